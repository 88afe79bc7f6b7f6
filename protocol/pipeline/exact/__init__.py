"""Exact steps: every microbatch of a step counts exactly once at each stage."""
