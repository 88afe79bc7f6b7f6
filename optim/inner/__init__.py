"""Inner optimizers: what one local step does with a gradient."""
