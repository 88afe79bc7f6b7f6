"""Peers of a pipeline as processes of their own, whose trainers sleep."""
