"""Randomized pipelines: the stages of a run, and the routes of microbatches through the peers that serve them."""
