"""Follow other peers: the swarm as the round loop sees it, catching up, and their conduct."""
