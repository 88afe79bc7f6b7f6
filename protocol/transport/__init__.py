"""gRPC over libp2p streams, with p2pd as a supervised child."""
