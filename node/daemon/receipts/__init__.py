"""Receipts: the signed commits of a run on disk, and proofs of the work of each volunteer."""
