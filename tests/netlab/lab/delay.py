"""Holds every packet that comes into a network namespace for a while: latency where the kernel has no netem.

A program of its own, started inside the namespace: `delay.py SECONDS JITTER`. The kernel's NFQUEUE hands over the
packets' numbers alone, over raw netlink, and lets go those that are accepted, all up to a number at once. This must
happen where packets arrive: held where they leave, they would count against their sender's TCP queue.
"""

import os
import random
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator

NETLINK_NETFILTER = 12
SOL_NETLINK, NETLINK_NO_ENOBUFS, SO_RCVBUFFORCE = 270, 5, 33
QUEUE_SUBSYSTEM = 3
PACKET, CONFIGURE, ACCEPT_UP_TO = 0, 2, 3  # message types
BIND, NUMBERS_ONLY, WHOLE_SEGMENTS, ACCEPT = 1, 1, 4, 1
BUFFER_BYTES = 8 << 20
MAX_WAITING = 65536  # packets
HEADER, NUMBER_OFFSET = 16, 24
READY = "ready"
PRIORITY = -15


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def message(kind: int, attributes: bytes) -> bytes:
    body = struct.pack("BBH", 0, 0, 0) + attributes
    return struct.pack("IHHII", HEADER + len(body), QUEUE_SUBSYSTEM << 8 | kind, 1, 0, 0) + body


def open_queue() -> socket.socket:
    """Queue 0 of this namespace, which all that arrives at eth0 goes through from now on."""
    queue = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
    queue.bind((0, 0))
    queue.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
    queue.setsockopt(SOL_NETLINK, NETLINK_NO_ENOBUFS, 1)
    queue.send(message(CONFIGURE, attribute(1, struct.pack(">BxH", BIND, socket.AF_INET))))
    mode = attribute(2, struct.pack(">IB", 0, NUMBERS_ONLY)) + attribute(3, struct.pack(">I", MAX_WAITING))
    flags = attribute(4, struct.pack(">I", WHOLE_SEGMENTS)) + attribute(5, struct.pack(">I", WHOLE_SEGMENTS))
    queue.send(message(CONFIGURE, mode + flags))
    rule = "iptables -t raw -A PREROUTING -i eth0 -j NFQUEUE --queue-num 0 --queue-bypass"
    subprocess.run(rule.split(), check=True)
    return queue


def packet_ids(message_bytes: bytes) -> Iterator[int]:
    """Of the packets that one read from the queue tells of."""
    position = 0
    while position + HEADER <= len(message_bytes):
        length, kind = struct.unpack_from("IH", message_bytes, position)
        if length < HEADER:
            return
        if kind & 255 == PACKET:
            yield struct.unpack_from(">I", message_bytes, position + NUMBER_OFFSET)[0]
        position += (length + 3) & ~3


def delay_packets(queue: socket.socket, delay: float, jitter: float) -> None:
    """For ever. Packets never overtake one another."""
    waiting: deque[tuple[float, int]] = deque()
    last = 0.0
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, number = waiting.popleft()
            queue.send(message(ACCEPT_UP_TO, attribute(2, struct.pack(">II", ACCEPT, number))))
        # A time-out of exactly nothing would mean not to wait at all, and to fail.
        queue.settimeout(max(waiting[0][0] - now, 1e-6) if waiting else None)
        try:
            arrived = list(packet_ids(queue.recv(65536)))
        except TimeoutError:
            continue
        if arrived:
            last = max(last, time.monotonic() + delay + random.random() * jitter)
            waiting.append((last, arrived[-1]))


def main() -> None:
    os.nice(PRIORITY)  # the delay must not grow where the machine is busy
    queue = open_queue()
    print(READY, flush=True)
    delay_packets(queue, float(sys.argv[1]), float(sys.argv[2]))


if __name__ == "__main__":
    main()
