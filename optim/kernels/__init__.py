"""Compiled loops, threads and memory that the codecs and aggregation rules compute with."""
