"""Who is in the run: signed expiring records, gossip, and a DHT to find the first peer."""
