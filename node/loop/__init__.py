"""Decide what a peer does for a run, as a pure loop: events in, actions out."""
