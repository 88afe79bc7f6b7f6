"""`murmur up`: run a whole swarm on this machine."""
