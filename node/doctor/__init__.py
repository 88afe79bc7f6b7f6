"""`murmur doctor`: check whether this machine can take part in a run, and what to fix."""
