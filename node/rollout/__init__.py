"""A peer that answers questions with the newest model and does not train: `murmur join RUN --role rollout`."""
