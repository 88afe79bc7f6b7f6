"""Models of the organiser's own: names and shapes from a file, no code."""
