"""The processes of a node: what tunes, starts and watches them."""
