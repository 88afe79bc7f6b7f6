"""Simulate many peers in one process: real gradients and messages, with a virtual clock and a virtual network."""
