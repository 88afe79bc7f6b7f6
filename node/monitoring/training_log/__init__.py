"""The metrics of a node over time: a file of lines in its folder, and loggers of other packages that read it."""
