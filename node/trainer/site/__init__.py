"""A site: several machines of one organisation that train as one peer.

The first machine runs a node with `--site HOST:PORT`; on each other one a person types `murmur rank`. Rank 0 listens at
that port (`head`), and the other machines dial it (`agent`). Each connection is TLS to the key in the token, and begins
with the token's secret. Through it go the commands of rank 0, the rendezvous (a TCPStore on the first machine's
loopback interface) and the connections of gloo, which has neither passwords nor encryption: each rank listens on a
loopback address of its own, and the same address on another machine leads to it (`tunnel`).
"""
