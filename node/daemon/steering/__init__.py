"""Revisions of a running manifest: a node keeps and spreads them, and `murmur steer` writes them."""
