"""Replace trainers, links, gossip and the clock for virtual peers."""
