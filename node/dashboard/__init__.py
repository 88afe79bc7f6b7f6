"""The public dashboard of a run: a node that observes the swarm, and a web page that shows it."""
