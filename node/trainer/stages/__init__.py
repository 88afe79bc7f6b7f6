"""A trainer of a stage of a pipeline: passes over microbatches that peers ask for."""
