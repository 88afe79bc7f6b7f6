"""Hostile peers as processes: what they do to an honest owner and server, and the same without the rule."""

import time
from pathlib import Path

import pytest

from tests.pipelines.swarm import Peer, Setting, Start, running

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]
FIRST, MICROBATCHES = 16, 60
ENDLESS = 10_000
SECONDS = 40.0  # honest owners need a few
MANY_DEATHS = 6


def done_in(zygote: str, folder: Path, hostile: str, naive: tuple[str, ...]) -> int:
    """Return how many microbatches an honest owner ends beside a hostile one."""
    starts = (Start(0, naive=naive), Start(1, naive=naive), Start(1, naive=(hostile,)))
    with running(zygote, folder, Setting(step=8, in_flight=8, seconds=0.02), *starts) as swarm:
        owner, _, stranger = swarm.peers
        swarm.begin(FIRST, owner)  # by which servers measure how soon owners come back
        wait_for(owner, FIRST)
        swarm.begin(ENDLESS, stranger)
        swarm.wait(lambda: bool(stranger.counts()["answers"]), "the attack has begun")
        time.sleep(1.0)
        swarm.begin(MICROBATCHES, owner)
        seconds = wait_for(owner, FIRST + MICROBATCHES)
        print(f"{hostile}, {naive}: {len(owner.last['ended'])} in {seconds:.1f} s")
        return len(owner.last["ended"])


def wait_for(owner: Peer, count: int) -> float:
    """Wait until an owner has ended that many microbatches, but not for long; return the seconds."""
    began = time.monotonic()
    while time.monotonic() - began < SECONDS and len(owner.counts()["ended"]) < count:
        time.sleep(0.2)
    return time.monotonic() - began


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("hostile", "old_rule"),
    [
        ("withholds backwards", "waits as long as owners ask"),
        ("computes nothing at a great rate", "believes rates and waits for outcomes"),
    ],
)
def test_stranger_does_not_stop_an_honest_owner(zygote: str, tmp_path: Path, hostile: str, old_rule: str) -> None:
    assert done_in(zygote, tmp_path / "rule", hostile, ()) == FIRST + MICROBATCHES
    assert done_in(zygote, tmp_path / "control", hostile, (old_rule,)) < MICROBATCHES / 2, "the control"


def test_trainers_die_twice_of_fatal_tokens_and_serve_on(zygote: str, tmp_path: Path) -> None:
    """The control, a server that computes them again, dies of them all the time."""
    starts = (
        Start(0),
        Start(0, naive=("computes fatal tasks again",)),
        Start(1),
        Start(1, naive=("draws fatal tokens",)),
    )
    with running(zygote, tmp_path, Setting(step=4), *starts) as swarm:
        server, naive, owner, stranger = swarm.peers
        swarm.begin(ENDLESS, stranger)
        swarm.wait(lambda: naive.counts()["trainer deaths"] >= MANY_DEATHS, "the control goes on dying")
        assert server.counts()["trainer deaths"] <= 3, swarm.describe()
        assert f"refusing a call of {stranger.name}" in server.full_log(), swarm.describe()
        naive.kill()
        swarm.begin(4, owner)
        swarm.wait(lambda: len(owner.counts()["ended"]) == 4, "an honest owner is served")
        assert server.counts()["trainer deaths"] <= 3, swarm.describe()
