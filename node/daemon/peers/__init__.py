"""What a daemon asks of other peers, and what it knows of them."""
