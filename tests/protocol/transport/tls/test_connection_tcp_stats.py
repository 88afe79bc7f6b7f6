"""The kernel's figures on arriving packets; tests/netlab/test_lossy_links.py shows that they count real losses."""

import socket

from protocol.transport.tls.connection import TcpReceiveStats, count_link_losses, read_tcp_receive_stats


def test_clean_connection_shows_no_loss() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            accepted.sendall(bytes(100_000))
            while client.recv(1 << 17, socket.MSG_PEEK) == b"":
                pass
            seen = read_tcp_receive_stats(client)
            assert 0 < seen.min_round_trip < 1_000_000 and seen.out_of_order_packets == 0
    assert read_tcp_receive_stats(client) == TcpReceiveStats(), "closed"


def test_losses_count_only_without_a_queue() -> None:
    before, after = TcpReceiveStats(50, 50, 10), TcpReceiveStats(60, 50, 30)
    assert count_link_losses(before, after) == 20
    assert count_link_losses(before, TcpReceiveStats(150, 50, 30)) == 0, "a full queue also drops packets"
    assert count_link_losses(after, TcpReceiveStats()) == 0
