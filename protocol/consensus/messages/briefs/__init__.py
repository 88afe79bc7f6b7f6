"""Briefs: signed messages without the parts that their receiver has seen in earlier messages."""
