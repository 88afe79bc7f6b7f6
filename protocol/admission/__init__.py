"""Who may take part in a run, and who may vote in its rounds."""
