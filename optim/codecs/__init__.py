"""Wire formats of messages."""
