"""Inner optimizers: how a local step uses a gradient."""
