"""What the kernel knows of the packets that come in over a connection: Linux's struct tcp_info, read at the receiver.

A packet that arrives after a gap says that one before it was lost (or overtaken). Whether a full queue or a bad link
lost it shows in the round trip: behind a queue it takes much longer than the shortest one seen.
"""

import socket
import struct
from dataclasses import dataclass

# Offsets of 32-bit numbers; an older kernel gives a shorter struct.
ROUND_TRIP, SHORTEST_ROUND_TRIP, OUT_OF_ORDER = 92, 148, 224
BYTES = OUT_OF_ORDER + 4
QUEUED = 1.5  # times the shortest round trip: packets wait somewhere


@dataclass(frozen=True)
class Arrivals:
    """`round_trip` now and at the `shortest`, in the same unit; `disordered`: packets so far that came after a gap."""

    round_trip: int = 0
    shortest: int = 0
    disordered: int = 0

    @property
    def queued(self) -> bool:
        """Whether packets wait somewhere on their way: then the link there is full."""
        return self.round_trip > QUEUED * self.shortest


def arrivals(connection: socket.socket) -> Arrivals:
    """Zeros where the kernel does not say, or the connection is closed."""
    if connection.fileno() < 0:
        return Arrivals()
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES)
    if len(info) < BYTES:
        return Arrivals()
    return Arrivals(*(struct.unpack_from("=I", info, at)[0] for at in (ROUND_TRIP, SHORTEST_ROUND_TRIP, OUT_OF_ORDER)))


def lost_on_the_way(before: Arrivals, after: Arrivals) -> int:
    """How many packets show, between two looks, that a bad link loses some, and not a queue that is full."""
    if after.queued or after.round_trip == 0:  # not known yet
        return 0
    return max(0, after.disordered - before.disordered)
