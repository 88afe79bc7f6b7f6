"""Compiled loops over values, and the memory and threads that they use."""
