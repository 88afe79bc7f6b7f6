"""Samples of text from the newest model, for the page."""
