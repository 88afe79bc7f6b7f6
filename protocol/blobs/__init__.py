"""Everything big: named by its hash, fetched from many, checked before use."""
