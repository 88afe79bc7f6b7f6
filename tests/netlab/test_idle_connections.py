"""Connections that rest between two rounds: they are noticed to be dead before somebody relies on them."""

import errno
import socket

import pytest

from protocol.transport.tls import listener
from tests.netlab.lab.laboratory import Laboratory

pytestmark = [pytest.mark.netlab, pytest.mark.timeout(120)]

PORT = 5001


def test_one_whose_other_end_has_vanished_is_cut(laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "KEEPALIVE_SECONDS", 1)
    here, there = laboratory.node(), laboratory.node()
    with laboratory.inside(there):
        server = socket.create_server((there.address, PORT))
    with laboratory.inside(here):
        ours, plain = (socket.create_connection((there.address, PORT)) for _ in range(2))
    with server, ours, plain:
        listener._configure_socket(ours, stall=1.0)
        laboratory.cut(there)
        ours.settimeout(30)
        with pytest.raises(TimeoutError) as caught:
            ours.recv(1)
        assert caught.value.errno == errno.ETIMEDOUT, "the kernel says so, not the clock of this test"
        plain.setblocking(False)
        with pytest.raises(BlockingIOError):  # the control: it would be found dead by the next round's calls
            plain.recv(1)
