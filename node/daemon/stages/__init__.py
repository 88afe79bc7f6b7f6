"""Serve one stage of a model, and send this peer's microbatches through all stages."""
