"""The other side of the laboratory's own tests, run inside a node: a program that sinks, echoes, sends or asks.

sockets.py sink PORT             accepts one connection after the other; prints bytes and seconds of each
sockets.py send HOST PORT BYTES  prints how long the connection took to stand
sockets.py echo PORT             answers each datagram
sockets.py ask HOST PORT COUNT   datagrams; prints how many were answered, and the quickest round trip
"""

import contextlib
import socket
import sys
import time
from collections.abc import Callable

REPLY_TIMEOUT_SECONDS = 0.5  # seconds for an answer to a datagram
CONNECT_TIMEOUT_SECONDS = 3.0
SEND_INTERVAL_SECONDS = 0.0005


def sink(port: str) -> None:
    with socket.create_server(("0.0.0.0", int(port))) as server:
        print("up", flush=True)
        while True:
            connection, _ = server.accept()
            with connection:
                total, began = 0, 0.0
                while data := connection.recv(1 << 18):
                    began = began or time.monotonic()
                    total += len(data)
                print(total, time.monotonic() - began, flush=True)


def send(host: str, port: str, size: str) -> None:
    began = time.monotonic()
    with socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_SECONDS) as connection:
        print(time.monotonic() - began, flush=True)
        connection.settimeout(None)
        connection.sendall(bytes(int(size)))


def echo(port: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("0.0.0.0", int(port)))
        print("up", flush=True)
        while True:
            server.sendto(*server.recvfrom(2048))


def ping(host: str, port: str, count: str) -> None:
    """Sends without waiting for the answers, so that a loss costs no time."""
    times: list[float] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect((host, int(port)))
        client.setblocking(False)
        for _ in range(int(count)):
            client.send(str(time.monotonic()).encode())
            time.sleep(SEND_INTERVAL_SECONDS)
            with contextlib.suppress(BlockingIOError):
                times.append(read_round_trip(client))
        client.settimeout(REPLY_TIMEOUT_SECONDS)
        with contextlib.suppress(TimeoutError):
            while len(times) < int(count):
                times.append(read_round_trip(client))
    # The quickest: not what a busy machine adds.
    print(len(times), min(times, default=0.0), flush=True)


def read_round_trip(client: socket.socket) -> float:
    """Of the next answer, in seconds."""
    sent = float(client.recv(2048))
    return time.monotonic() - sent


if __name__ == "__main__":
    roles: dict[str, Callable[..., None]] = {"sink": sink, "send": send, "echo": echo, "ask": ping}
    roles[sys.argv[1]](*sys.argv[2:])
