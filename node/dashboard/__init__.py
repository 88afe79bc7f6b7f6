"""The public face of a run: a node that watches it, and a page that shows what it sees."""
