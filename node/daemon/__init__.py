"""The network side of a node: it talks, decides and keeps, and never touches the accelerator."""
