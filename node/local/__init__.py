"""`murmur up`: a whole swarm on this machine."""
