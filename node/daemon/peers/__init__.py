"""Ask other peers for messages, chains and blobs, and keep a view of the swarm."""
