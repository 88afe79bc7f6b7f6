"""The report of a run: the same figures and words for `murmur up`, for a host, and for its page."""
