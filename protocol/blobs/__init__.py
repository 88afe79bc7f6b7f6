"""Content-addressed blobs: named by their hash, fetched from several peers, and checked before use."""
