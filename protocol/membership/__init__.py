"""The peers of a run: signed expiring records, gossip, and a DHT to find the first peer."""
