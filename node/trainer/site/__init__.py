"""A site: several machines of one organisation that train as one peer.

The first machine runs a node with `--site HOST:PORT`; each other machine runs `murmur rank`. Rank 0 listens at that
port (`head`), and the other machines connect to it (`agent`). Each connection is TLS to the key in the token, and
starts with the token's secret. It carries the commands of rank 0, the rendezvous (a TCPStore on the first machine's
loopback interface) or a connection of gloo, which has neither passwords nor encryption: each rank listens on its own
loopback address, and tunnels make that address available on every other machine (`tunnel`).
"""
