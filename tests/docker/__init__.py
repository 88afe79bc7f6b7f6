"""The volunteer's image, and the check that builds and uses it."""
