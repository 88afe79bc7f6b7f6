"""Aggregation rules: how the contributions of a round become one update."""
