"""What a round decides and how: pure, without clock, network or randomness."""
