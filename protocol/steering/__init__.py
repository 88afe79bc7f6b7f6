"""Signed revisions of a manifest, by which the organiser changes a running run."""
