"""Structure-aware fuzzing of every decoder: `python -m tests.fuzz --frames 1000000`."""
