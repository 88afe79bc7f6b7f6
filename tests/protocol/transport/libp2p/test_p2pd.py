"""p2pd as a child process: its command line, its ports and sockets, restarts, and its end."""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

from protocol.errors import TransportError
from protocol.identity import Identity
from protocol.transport import local_sockets, p2pd
from protocol.transport.local_sockets import SocketFolder
from protocol.transport.p2pd import LAUNCHER, P2pd, P2pdOptions, command_line, with_bound_ports

pytestmark = pytest.mark.slow

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


def test_command_line_overrides_defaults_that_contact_strangers(tmp_path: Path) -> None:
    flags = command_line(P2pdOptions(tmp_path / "key", LOOPBACK), LOOPBACK, tmp_path)
    assert {"-b=0", "-natPortMap=0", "-relayService=0", "-autoRelay=0"} <= set(flags)
    assert not any("bootstrapPeers" in flag or "announceAddrs" in flag for flag in flags)
    announced = P2pdOptions(tmp_path / "key", LOOPBACK, announce=("/ip4/192.0.2.1/tcp/9",))
    assert "-announceAddrs=/ip4/192.0.2.1/tcp/9" in command_line(announced, LOOPBACK, tmp_path)
    hidden = P2pdOptions(tmp_path / "key", LOOPBACK, relays=("/ip4/192.0.2.1/tcp/9/p2p/QmRelay",))
    expected = {"-relay=1", "-autoRelay=1", "-trustedRelays=/ip4/192.0.2.1/tcp/9/p2p/QmRelay", "-relayDiscovery=0"}
    assert expected <= set(command_line(hidden, LOOPBACK, tmp_path))


def test_bound_ports_replace_port_0() -> None:
    listen = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0", "/ip4/0.0.0.0/udp/0/quic-v1", "/ip4/0.0.0.0/tcp/77")
    bound = ("/ip4/10.0.0.1/tcp/11", "/ip4/127.0.0.1/tcp/11", "/ip6/::1/tcp/22", "/ip4/10.0.0.1/udp/33/quic-v1")
    expected = ("/ip4/0.0.0.0/tcp/11", "/ip6/::/tcp/22", "/ip4/0.0.0.0/udp/33/quic-v1", "/ip4/0.0.0.0/tcp/77")
    assert with_bound_ports(listen, bound) == expected
    assert with_bound_ports(listen, ()) == listen


async def test_key_file_works_for_p2pd_and_hivemind(tmp_path: Path) -> None:
    identity = Identity.load_or_create(tmp_path / "key")
    folder = SocketFolder.create(tmp_path)
    ours = await P2pd.start(P2pdOptions(tmp_path / "key", LOOPBACK), folder.path, {})
    assert ours.peer_id == ours.p2p.peer_id.to_base58() == identity.peer_id
    await ours.stop()
    theirs = await P2P.create(identity_path=str(tmp_path / "key"), nat_port_map=False)
    assert theirs.peer_id.to_base58() == identity.peer_id
    await theirs.shutdown()
    folder.remove()


async def test_p2pd_opens_one_port_and_no_socket_outside_its_folder(tmp_path: Path) -> None:
    Identity.load_or_create(tmp_path / "key")
    folder = SocketFolder.create(tmp_path)
    daemon = await P2pd.start(P2pdOptions(tmp_path / "key", LOOPBACK), folder.path, {})
    _, addresses = await daemon.client.identify()
    process = psutil.Process(daemon.pid)
    local_sockets = [f"/ip4/{c.laddr.ip}/tcp/{c.laddr.port}" for c in process.net_connections("inet")]
    assert local_sockets == list(addresses)
    sockets = {str(c.laddr) for c in process.net_connections("unix") if c.laddr}
    assert all(name.startswith(str(folder.path)) for name in sockets)
    assert os.getpgid(daemon.pid) == daemon.pid, "a Ctrl-C in the terminal must not reach it"
    await daemon.stop()
    assert not psutil.pid_exists(daemon.pid)
    folder.remove()


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
async def test_killed_p2pd_is_restarted_at_the_same_addresses(
    tmp_path: Path, signal_number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    Identity.load_or_create(tmp_path / "key")
    folder = SocketFolder.create(tmp_path)
    daemon = await P2pd.start(P2pdOptions(tmp_path / "key", LOOPBACK), folder.path, {})
    before, first, addresses = daemon.pid, daemon.p2p, await daemon.client.identify()
    restarted = asyncio.Event()
    daemon.on_restart(restarted.set)
    for _ in range(2):
        restarted.clear()
        os.kill(daemon.pid, signal_number)
        await asyncio.wait_for(restarted.wait(), 10)
    assert daemon.pid != before
    assert daemon.p2p is not first
    assert await daemon.client.identify() == addresses, "others know us by these addresses"
    assert "p2pd exited with code" in caplog.text
    await daemon.stop()
    folder.remove()


async def test_start_waits_for_a_taken_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Identity.load_or_create(tmp_path / "key")
    folder = SocketFolder.create(tmp_path)
    monkeypatch.setattr(local_sockets, "PORT_RETRY_SECONDS", 60.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        listen = (f"/ip4/127.0.0.1/tcp/{other.getsockname()[1]}",)
        starting = asyncio.create_task(P2pd.start(P2pdOptions(tmp_path / "key", listen), folder.path, {}))
        async with asyncio.timeout(30):
            while "trying again for" not in caplog.text:
                await asyncio.sleep(0.05)
    daemon = await asyncio.wait_for(starting, 60)
    assert (await daemon.client.identify())[1] == listen
    assert caplog.text.count("trying again for") == 1
    await daemon.stop()
    folder.remove()


async def test_taken_port_and_missing_binary_raise_one_line_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_sockets, "PORT_RETRY_SECONDS", 0.5)
    Identity.load_or_create(tmp_path / "key")
    folder = SocketFolder.create(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = (f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}",)
        expected = f"another program uses {listen[0]}; choose another --listen"
        with pytest.raises(TransportError, match=expected) as refused:
            await P2pd.start(P2pdOptions(tmp_path / "key", listen), folder.path, {})
        assert "\n" not in str(refused.value)
    monkeypatch.setattr(p2pd, "BINARY", tmp_path / "missing")
    with pytest.raises(TransportError, match="No such file"):
        await P2pd.start(P2pdOptions(tmp_path / "key", LOOPBACK), folder.path, {})
    folder.remove()


@pytest.mark.parametrize("limit", [60.0, 1.0])
async def test_slow_p2pd_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, limit: float
) -> None:
    caplog.set_level(logging.INFO)
    Identity.load_or_create(tmp_path / "key")
    folder = SocketFolder.create(tmp_path)
    slow = tmp_path / "p2pd"
    slow.write_text(f'#!/bin/sh\nsleep 2\nexec {p2pd.BINARY} "$@"\n')
    slow.chmod(0o700)
    monkeypatch.setattr(p2pd, "BINARY", slow)
    monkeypatch.setattr(p2pd, "SLOW_START_SECONDS", 0.2)
    monkeypatch.setattr(p2pd, "START_SECONDS", limit)
    starting = P2pd.start(P2pdOptions(tmp_path / "key", LOOPBACK), folder.path, {})
    if limit < 2:  # the control
        with pytest.raises(TransportError, match="not ready after 1 s"):
            await starting
    else:
        await (await starting).stop()
    assert "waiting" in caplog.text
    folder.remove()


async def test_restarts_back_off_until_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Identity.load_or_create(tmp_path / "key")
    folder = SocketFolder.create(tmp_path)
    daemon = await P2pd.start(P2pdOptions(tmp_path / "key", LOOPBACK), folder.path, {})
    restarted, binary = asyncio.Event(), p2pd.BINARY
    daemon.on_restart(restarted.set)
    monkeypatch.setattr(p2pd, "BINARY", tmp_path / "missing")
    os.kill(daemon.pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        while "next attempt in 0.4 s" not in caplog.text:
            await asyncio.sleep(0.02)
        monkeypatch.setattr(p2pd, "BINARY", binary)
        await restarted.wait()
    await daemon.stop()
    folder.remove()


async def test_dead_seeds_prevent_hiveminds_own_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = SocketFolder.create(tmp_path)
    monkeypatch.setattr(P2P, "_UNIX_SOCKET_PREFIX", f"/unix{folder.path}/")  # hivemind leaves a socket there
    dead = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.create().peer_id}"
    before = set(psutil.Process().children())
    with pytest.raises(P2PDaemonError, match="bootstrap"):
        await P2P.create(initial_peers=[dead], nat_port_map=False)
    async with asyncio.timeout(10):
        while set(psutil.Process().children()) - before:  # hivemind does not wait for it
            await asyncio.sleep(0.01)
    folder.remove()


@pytest.mark.parametrize("tied", [True, False])
def test_kernel_kills_p2pd_with_its_parent(tied: bool) -> None:
    """Launch another program instead of p2pd, because p2pd may also end by itself when its last client disconnects."""
    launch = ["-c", LAUNCHER, "PARENT"] if tied else ["-c", "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"]
    parent = (
        "import os, subprocess, sys\n"
        "command = [str(os.getpid()) if word == 'PARENT' else word for word in sys.argv[1:]]\n"
        "child = subprocess.Popen(command, stdout=subprocess.DEVNULL, process_group=0)\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    command = [sys.executable, "-c", parent, sys.executable, *launch, "/bin/sleep", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        child = psutil.Process(int(process.stdout.readline()))
        while child.name() != "sleep":
            time.sleep(0.01)
        process.kill()
    ended, living = psutil.wait_procs([child], timeout=5 if tied else 0.5)
    assert bool(ended) == tied
    for left in living:
        left.kill()


def test_hivemind_logs_through_our_handlers(caplog: pytest.LogCaptureFixture) -> None:
    assert logging.getLogger("hivemind").handlers == []
    logging.getLogger("hivemind.p2p").warning("from hivemind")
    assert "from hivemind" in caplog.text
