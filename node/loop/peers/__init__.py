"""What the round loop knows of other peers, and how it follows them."""
