"""`murmur eval`: a model on held-out text and on tasks of lm-eval, and the history of the results."""
