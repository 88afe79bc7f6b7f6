"""The consensus of a round: pure, without clock, network or randomness."""
