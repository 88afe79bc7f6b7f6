"""Many virtual peers in one process: real gradients and real messages under a virtual clock and a virtual network."""
