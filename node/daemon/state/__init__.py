"""The state that a replica keeps: in memory, on disk and over restarts."""
