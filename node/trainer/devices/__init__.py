"""The devices that a trainer computes on: their choice, compiled models, and pauses while others use them."""
