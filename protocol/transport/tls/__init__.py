"""Direct TLS 1.3 connections between peers: listener, handshake, framed connections and RPC."""
