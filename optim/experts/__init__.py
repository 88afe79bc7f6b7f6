"""Experts of a mixture that only those exchange who trained them."""
