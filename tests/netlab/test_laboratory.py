"""The laboratory measured by itself: what it says of its links is so, and nothing of it stays behind."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.netlab.lab import namespaces, socket_probe
from tests.netlab.lab.laboratory import HOME, Laboratory, Link, Node, read_line
from tests.netlab.lab.namespaces import FOLDER, remove_orphans, run

pytestmark = [pytest.mark.netlab, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]
PORT = "5001"
PAYLOAD_SHARE = 1448 / 1514  # of a full Ethernet frame, what TCP carries
COUNT = 400
OWN_PREFIX = "murmurtest"
REMOVER = f"""
from tests.netlab.lab import namespaces
namespaces.PREFIX = "{OWN_PREFIX}"
namespaces.remove_orphans()
"""
OWNER = f"""
import sys, time
from tests.netlab.lab import namespaces
from tests.netlab.lab.laboratory import Laboratory, Link
namespaces.PREFIX = "{OWN_PREFIX}"
with Laboratory() as made:
    made.node(Link(delay=0.01))
    print(made.start(made.node(), ["sleep", "60"]).pid, flush=True)
    time.sleep(60)
"""


def serve(laboratory: Laboratory, node: Node, what: str) -> subprocess.Popen[str]:
    process = laboratory.start(node, [sys.executable, "-S", socket_probe.__file__, what, PORT])
    assert read_line(process) == "up"
    return process


def call(laboratory: Laboratory, node: Node, what: str, host: str, amount: int) -> subprocess.Popen[str]:
    return laboratory.start(node, [sys.executable, "-S", socket_probe.__file__, what, host, PORT, str(amount)])


def numbers(process: subprocess.Popen[str]) -> list[float]:
    """Of the one line that it prints."""
    return list(map(float, read_line(process).split()))


def answered(laboratory: Laboratory, source: Node, host: str, count: int = 20) -> int:
    return int(numbers(call(laboratory, source, "ask", host, count))[0])


@pytest.mark.parametrize(("source", "target", "expected"), [(20, 100, 20), (100, 10, 10)], ids=["up", "down"])
def test_rates(laboratory: Laboratory, source: float, target: float, expected: float) -> None:
    one, two = laboratory.node(Link(up=source)), laboratory.node(Link(down=target))
    sink = serve(laboratory, two, "sink")
    size = int(expected * 1e6 / 8 * 1.5)
    before = laboratory.interface_bytes(two)[1]
    call(laboratory, one, "send", two.address, size)
    received, seconds = numbers(sink)
    rate = received * 8 / seconds / 1e6 / PAYLOAD_SHARE
    print(f"{rate:.2f} Mbit/s of {expected}")
    assert received == size and laboratory.interface_bytes(two)[1] - before > size
    assert abs(rate / expected - 1) < 0.1


def test_a_round_trip_takes_the_delays_of_both_ends(laboratory: Laboratory) -> None:
    one, two, three = (laboratory.node(Link(delay=delay)) for delay in (0.03, 0.01, 0.0))
    for node in (two, three):
        serve(laboratory, node, "echo")
    for node, expected in ((two, 0.04), (three, 0.03)):
        count, quick = numbers(call(laboratory, one, "ask", node.address, COUNT))
        print(f"{quick * 1000:.1f} ms of {expected * 1000:g}")
        assert count == COUNT and expected <= quick < expected + 0.006
    laboratory.set_link(one, Link())
    count, quick = numbers(call(laboratory, one, "ask", three.address, COUNT))
    assert count == COUNT and quick < 0.01, "the control: without a delay there is none"


def test_the_share_that_is_lost(laboratory: Laboratory) -> None:
    one, two = laboratory.node(Link(loss=0.2)), laboratory.node()
    serve(laboratory, two, "echo")
    lost = 1 - answered(laboratory, one, two.address, 2000) / 2000
    print(f"lost {lost:.1%} of 20 %")
    assert abs(lost - 0.2) < 0.04, "more than four standard deviations"
    laboratory.set_link(one, Link())
    assert answered(laboratory, one, two.address, COUNT) == COUNT


def test_blocks_partitions_and_cuts_are_silent_and_heal(laboratory: Laboratory) -> None:
    one, two, three = (laboratory.node() for _ in range(3))
    for node in (two, three):
        serve(laboratory, node, "echo")
    sink = serve(laboratory, one, "sink")

    def reached() -> tuple[bool, bool]:
        return answered(laboratory, one, two.address) > 0, answered(laboratory, one, three.address) > 0

    assert reached() == (True, True)
    laboratory.block(two, one)
    assert reached() == (False, True), "its answers do not come"
    before = laboratory.interface_bytes(two)[1]
    answered(laboratory, one, two.address)
    assert laboratory.interface_bytes(two)[1] > before, "but it hears"
    laboratory.heal()
    laboratory.partition([one, two], [three])
    assert reached() == (True, False)
    laboratory.cut(one)
    assert reached() == (False, False)
    laboratory.heal()
    sending = call(laboratory, two, "send", one.address, 60_000_000)
    numbers(sending)  # the connection stands
    laboratory.cut(two)
    assert reached()[0] is False and sending.poll() is None
    laboratory.heal()
    assert numbers(sink)[0] == 60_000_000, "a cut connection goes on when it is healed"


def test_an_unplugged_cable_is_noticed(laboratory: Laboratory) -> None:
    one, two = laboratory.node(), laboratory.node()
    serve(laboratory, two, "echo")
    laboratory.unplug(one)
    failing = call(laboratory, one, "ask", two.address, 1)
    assert "Network is unreachable" in failing.communicate(timeout=10)[1]
    laboratory.plug(one)
    assert answered(laboratory, one, two.address) > 0


def test_a_home_router_hides_who_is_behind_it(laboratory: Laboratory) -> None:
    public = laboratory.node()
    homes = [laboratory.router() for _ in range(2)]
    hidden = [laboratory.node(behind=home) for home in homes]
    mate = laboratory.node(behind=homes[0])
    assert hidden[0].address == hidden[1].address == f"{HOME}.2" and hidden[0].public == homes[0].address
    for node in (public, *hidden, mate):
        serve(laboratory, node, "echo")
    assert answered(laboratory, hidden[0], public.address) == 20, "out"
    assert answered(laboratory, hidden[0], mate.address) == 20, "within the house"
    assert answered(laboratory, public, hidden[0].public) == 0, "not in"
    assert answered(laboratory, hidden[1], hidden[0].public) == 0, "nor from another house"
    laboratory.cut(hidden[0])
    assert answered(laboratory, hidden[0], public.address) == 0
    assert answered(laboratory, hidden[1], public.address) == 20
    laboratory.heal()
    laboratory.unplug(hidden[0])
    laboratory.plug(hidden[0])
    assert answered(laboratory, hidden[0], public.address) == 20


@pytest.fixture
def own_prefix(permitted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Laboratories beside this test leave its orphans alone."""
    monkeypatch.setattr(namespaces, "PREFIX", OWN_PREFIX)


@pytest.fixture
def orphan(own_prefix: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a namespace whose owner is dead, without the namespace."""
    with subprocess.Popen([sys.executable, "-c", ""]) as owner:
        owner.wait()
    name = f"{OWN_PREFIX}-{owner.pid}-1-node1"
    yield name
    monkeypatch.setattr(namespaces, "run", run)
    namespaces.remove(name)


def test_orphan_that_two_laboratories_remove_at_once_is_no_error(orphan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let another process remove it before each command of ours: it fails on what is not there any more."""
    run = namespaces.run
    for rival in ("pids", "del"):
        run(f"ip netns add {orphan}")

        def overtaken(command: str, rival: str = rival) -> str:
            if f"netns {rival} {orphan}" in command:
                run(f"ip netns del {orphan}")
                with pytest.raises(RuntimeError, match="No such file"):
                    run(command)  # the control: by itself the command fails
            return run(command)

        monkeypatch.setattr(namespaces, "run", overtaken)
        remove_orphans()
        assert not (FOLDER / orphan).exists()


def test_orphan_that_cannot_be_removed_is_an_error(orphan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(f"ip netns add {orphan}")

    def refuse(command: str) -> str:
        raise RuntimeError(f"{command}: not permitted")

    monkeypatch.setattr(namespaces, "run", refuse)
    with pytest.raises(RuntimeError, match="not permitted"):
        remove_orphans()
    monkeypatch.setattr(namespaces, "run", run)
    remove_orphans()
    assert not (FOLDER / orphan).exists()


def test_file_that_a_restart_left_without_its_mount_is_removed(orphan: str) -> None:
    (FOLDER / orphan).touch()
    with pytest.raises(OSError, match="setns"), namespaces.inside(orphan):
        pass  # the control: it is no namespace
    remove_orphans()
    assert not (FOLDER / orphan).exists()


@pytest.mark.nightly
def test_many_laboratories_remove_the_same_orphans(orphan: str) -> None:
    names = [f"{orphan}{number}" for number in range(8)]
    for name in names:
        run(f"ip netns add {name}")
    command = [sys.executable, "-c", REMOVER]
    removers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(4)]
    said = [remover.communicate(timeout=60)[1] for remover in removers]
    assert [remover.returncode for remover in removers] == [0] * 4, said
    assert not any((FOLDER / name).exists() for name in names)


def own_namespaces(pid: int) -> list[Path]:
    return list(FOLDER.glob(f"{OWN_PREFIX}-{pid}-*"))


def test_nothing_stays_behind_not_even_of_a_killed_owner(own_prefix: None) -> None:
    interfaces = {name for _, name in socket.if_nameindex()}
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as owner:
        assert owner.stdout
        sleeper = int(owner.stdout.readline())
        assert len(own_namespaces(owner.pid)) == 3
        remove_orphans()
        assert len(own_namespaces(owner.pid)) == 3, "the control: a living owner's are left alone"
        owner.send_signal(signal.SIGKILL)
    assert own_namespaces(owner.pid)
    with Laboratory():
        assert not own_namespaces(owner.pid)
    end = time.monotonic() + 10
    while Path(f"/proc/{sleeper}/cmdline").exists() and Path(f"/proc/{sleeper}/cmdline").read_bytes():
        assert time.monotonic() < end, "its processes go, too"
        time.sleep(0.05)
    assert {name for _, name in socket.if_nameindex()} == interfaces, "bridges and cables are in the namespaces alone"
