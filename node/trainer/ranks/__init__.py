"""Training on several devices of one node: a process for each of them, its rank, and one contribution of all.

Rank 0 is the trainer that the daemon started. It starts the others, reads the text, keeps the counters and talks to the
daemon. Each rank holds its own part of each parameter (FSDP2), with the optimizer's vectors for it, computes its own
part of each batch, and copies its parts from and into the shared memory. If one of them dies, all of them end, and the
daemon starts rank 0 again.
"""
