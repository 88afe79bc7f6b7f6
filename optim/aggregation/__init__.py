"""Combine the contributions of a round into one update."""
