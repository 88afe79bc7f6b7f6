"""What the kernel knows of the packets that come in over a connection: Linux's struct tcp_info, read at the receiver.

A packet that arrives after a gap says that one before it was lost (or overtaken). Whether a full queue or a bad link
lost it shows in the round trip: behind a queue it takes much longer than the shortest one seen.
"""

import socket
import struct
from dataclasses import dataclass

# Offsets of 32-bit numbers; an older kernel gives a shorter struct.
ROUND_TRIP_OFFSET, MIN_ROUND_TRIP_OFFSET, OUT_OF_ORDER_OFFSET = 92, 148, 224
TCP_INFO_BYTES = OUT_OF_ORDER_OFFSET + 4
QUEUED_RATIO = 1.5  # times the shortest round trip: packets wait somewhere


@dataclass(frozen=True)
class TcpReceiveStats:
    """`round_trip` now and at the `shortest`, in the same unit; `disordered`: packets so far that came after a gap."""

    round_trip: int = 0
    min_round_trip: int = 0
    out_of_order_packets: int = 0

    @property
    def is_queued(self) -> bool:
        """Whether packets wait somewhere on their way: then the link there is full."""
        return self.round_trip > QUEUED_RATIO * self.min_round_trip


def read_tcp_receive_stats(connection: socket.socket) -> TcpReceiveStats:
    """Zeros where the kernel does not say, or the connection is closed."""
    if connection.fileno() < 0:
        return TcpReceiveStats()
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    if len(info) < TCP_INFO_BYTES:
        return TcpReceiveStats()
    return TcpReceiveStats(*(struct.unpack_from("=I", info, at)[0] for at in (ROUND_TRIP_OFFSET, MIN_ROUND_TRIP_OFFSET, OUT_OF_ORDER_OFFSET)))


def count_link_losses(before: TcpReceiveStats, after: TcpReceiveStats) -> int:
    """How many packets show, between two looks, that a bad link loses some, and not a queue that is full."""
    if after.is_queued or after.round_trip == 0:  # not known yet
        return 0
    return max(0, after.out_of_order_packets - before.out_of_order_packets)
