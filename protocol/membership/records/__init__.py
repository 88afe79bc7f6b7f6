"""The fields of a peer's record: their bounds, updates and summaries."""
