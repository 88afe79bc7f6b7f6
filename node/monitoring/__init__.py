"""Report what a node does: status, metrics, logs and the HTTP server that serves them."""
