"""Choose the vectors that each round sends, and its options."""
