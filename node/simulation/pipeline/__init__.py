"""Randomized pipelines in virtual time: stages with real rounds, microbatches with real gradients."""
