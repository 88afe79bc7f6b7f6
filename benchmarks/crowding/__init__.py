"""The two halves of benchmarks/crowd.py: a swarm of real processes, and a round of virtual peers."""
