"""The decided commits: the chain, its certificates, and the choice between two chains."""
