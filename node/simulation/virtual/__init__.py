"""What virtual peers have in place of trainers, links, gossip and a clock."""
