"""Reach peers by direct TLS 1.3: listener, handshake, framed connections and RPC."""
