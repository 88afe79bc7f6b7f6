"""The signed messages of a round, and their checks."""
