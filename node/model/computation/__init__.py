"""How a model computes its loss and gradient: precision, chunks of the loss, and activations computed again."""
