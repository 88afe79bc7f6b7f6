"""What the kernel tells of arrivals; that it counts real losses is seen in tests/netlab/test_lossy_links.py."""

import socket

from protocol.network.arrivals import Arrivals, arrivals, lost_on_the_way


def test_a_clean_connection_shows_no_loss() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            accepted.sendall(bytes(100_000))
            while client.recv(1 << 17, socket.MSG_PEEK) == b"":
                pass
            seen = arrivals(client)
            assert 0 < seen.shortest < 1_000_000 and seen.disordered == 0
    assert arrivals(client) == Arrivals(), "closed"


def test_losses_count_where_no_queue_stands() -> None:
    before, after = Arrivals(50, 50, 10), Arrivals(60, 50, 30)
    assert lost_on_the_way(before, after) == 20
    assert lost_on_the_way(before, Arrivals(150, 50, 30)) == 0, "a full queue drops packets, too"
    assert lost_on_the_way(after, Arrivals()) == 0
