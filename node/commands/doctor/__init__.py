"""`murmur doctor`: check whether this machine can take part in a run, and say how to fix what hinders it."""
