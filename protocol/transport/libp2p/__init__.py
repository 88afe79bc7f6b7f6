"""Reach peers through p2pd: streams, relays and the gRPC bridges over them."""
