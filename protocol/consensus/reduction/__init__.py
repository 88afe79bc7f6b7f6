"""Parts that reducers sum for all members, and the evidence that they summed them."""
