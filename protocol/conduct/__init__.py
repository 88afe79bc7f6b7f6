"""What a peer remembers of the misdeeds of others: proofs, which exclude a key, and strikes, which pass."""
