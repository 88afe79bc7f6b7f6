"""Saved states: atomic, hashed, and knowing nothing of peers."""
