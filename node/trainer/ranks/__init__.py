"""Train on several devices of one node: one process (rank) per device, and one contribution of all.

Rank 0 is the trainer that the daemon started. It starts the others, reads the text, keeps the counters and exchanges
messages with the daemon. Each rank holds a part of each parameter (FSDP2) with the optimizer's vectors for it, computes
a part of each batch, and copies its parts from and into the shared memory. If one rank dies, all of them exit, and the
daemon restarts rank 0.
"""
