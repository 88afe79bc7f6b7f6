"""The torch side of a node: its own process, which opens no socket."""
