"""The torch side of a node: a separate process that opens no socket."""
