"""Tune, start and watch the processes of a node."""
