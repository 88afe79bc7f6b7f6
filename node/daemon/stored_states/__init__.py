"""Keep the newest state of a run without training: the host's copy of the model, and the way to fetch it."""
