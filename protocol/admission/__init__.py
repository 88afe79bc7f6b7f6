"""Decide which keys may take part in a run, and which may vote in its rounds."""
