"""Remember the misdeeds of other peers: proofs, which exclude a key, and strikes, which pass."""
