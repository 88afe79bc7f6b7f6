"""The organiser steers a run of real peers: each revision holds from one round for all, also for one that was down."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from node.daemon.steering.client import contact_run
from protocol.consensus.messages.signed import SignedMessage
from protocol.identity import Identity
from protocol.manifest.run import Manifest
from protocol.signing import sign
from protocol.steering import REVISION_KIND, Revision
from tests.swarm.process_swarm import ENDLESS, ProcessSwarm, manifest_with, running_swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

HOLDS = re.compile(r"round (\d+) has the organiser's revision (\d+): (.*)")


class Organiser:
    """The organiser's key, and `murmur steer` with it."""

    def __init__(self, folder: Path) -> None:
        self.key = folder / "organiser.key"
        self.identity = Identity.load_or_create(self.key)

    def steer(self, swarm: ProcessSwarm, *words: object) -> str:
        folder = next(peer.folder for peer in swarm.peers if peer.is_running)
        command = [sys.executable, "-m", "node.cli", "steer", str(folder), "--key", str(self.key), *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr + swarm.describe()
        return done.stdout


def steered_run(organiser: Organiser, **tables: Any) -> Manifest:
    """A run whose rounds take about a second."""
    method = {"recipe": "diloco", "schedule": {"inner_steps": 60}}
    run = {"min_peers": 2, "organiser_key": organiser.identity.peer_id}
    return manifest_with(**{"target": {"rounds": ENDLESS}, "run": run, "method": method, **tables})


def rounds_of(swarm: ProcessSwarm) -> list[dict[int, int]]:
    """Return for each peer the round from which each revision has held, as its log says."""
    return [{int(found[2]): int(found[1]) for found in HOLDS.finditer(swarm.log(peer))} for peer in swarm.peers]


def forge(manifest: Manifest, addresses: tuple[str, ...]) -> None:
    """Hand a peer a revision that somebody else has signed."""

    async def publish() -> int:
        async with contact_run(manifest, addresses) as contact:
            body = Revision(1, b"", 0, '{"target.rounds":1}', 1.0)
            envelope = sign(Identity.create(), REVISION_KIND, manifest.run_id, body.to_wire())
            return await contact.publish([SignedMessage.of(envelope, body)])

    assert asyncio.run(publish()) == 0, "nobody takes it"


@pytest.mark.nightly
def test_peers_follow_a_revision_from_one_round_on_though_one_was_down(tmp_path: Path) -> None:
    organiser = Organiser(tmp_path)
    with running_swarm(tmp_path, steered_run(organiser)) as swarm:
        swarm.start()
        swarm.wait_for_round(3)
        away = swarm.peers[2]
        away.kill()
        forge(swarm.manifest, swarm.peers[0].addresses())
        told = organiser.steer(swarm, "--set", "train.learning_rate=0.001", "--set", "round.grace=1.5")
        assert re.fullmatch(
            r"revision 1: round\.grace 2\.0 -> 1\.5, train\.learning_rate 0\.003 -> 0\.001, from round (\d+); "
            r"2 peers have it\n",
            told,
        ), told
        first = int(told.split("from round ")[1].split(";")[0])
        swarm.wait_for_round(first + 1, *swarm.peers[:2])
        away.start(swarm.peers[0].addresses()[:1])
        swarm.wait_until(lambda: all(status.revision == 1 for status in swarm.poll()), "all have it", 120)
        rates = {status.learning_rate for status in swarm.poll() if status.learning_rate is not None}
        swarm.wait_until(
            lambda: {round(status.learning_rate or 0.0, 9) for status in swarm.poll()} == {0.001},
            f"all train with it (not {rates})", 60,
        )  # fmt: skip
        agreed = swarm.wait_for_agreement(after=first)
        assert sum(status.refusals.get("forged", 0) for status in swarm.poll()) >= 1, swarm.describe()
        organiser.steer(swarm, "stop")
        swarm.wait_until(lambda: all(peer.returncode is not None for peer in swarm.peers), "all have ended", 120)
        ends = {(status.round, status.digest, status.state_digest) for status in swarm.poll()}
        assert len(ends) == 1, swarm.describe()
        found = rounds_of(swarm)
        assert found[0] == found[1] and found[0][1] == first and set(found[0]) == {1, 2}, found
        assert found[2][2] == found[0][2] == next(iter(ends))[0] > agreed, "all stop at the same round"
        assert '"revisions"' in (away.folder / "revisions.json").read_text()


def test_run_pauses_and_goes_on_and_a_run_that_is_over_is_extended(tmp_path: Path) -> None:
    organiser = Organiser(tmp_path)
    with running_swarm(tmp_path, steered_run(organiser, target={"rounds": ENDLESS, "keepers": 1}), peers=2) as swarm:
        swarm.start()
        swarm.wait_for_round(2)
        organiser.steer(swarm, "pause")
        swarm.wait_until(lambda: all(status.phase == "paused" for status in swarm.poll()), "all pause", 60)
        paused = {status.round for status in swarm.poll()}
        assert len(paused) == 1, swarm.describe()
        assert all(status.tokens_per_second == 0.0 for status in swarm.poll())
        swarm.peers[1].interrupt()
        swarm.wait_until(lambda: not swarm.peers[1].is_running, "one leaves", 60)
        swarm.peers[1].start(swarm.peers[0].addresses()[:1])
        swarm.wait_until(
            lambda: [status.phase for status in swarm.poll()] == ["paused"] * 2 and swarm.peers[1].is_running,
            "it is back, and pauses too", 90,
        )  # fmt: skip
        assert {status.round for status in swarm.poll()} == paused, "no round was made"
        assert f"from round {paused.copy().pop()}; 2 peers have it" in organiser.steer(swarm, "resume")
        swarm.wait_for_round(paused.pop() + 2)

        swarm.peers[1].kill()  # the other stays at the end until somebody has the model
        soon = swarm.poll(swarm.peers[0])[0].round + 8
        organiser.steer(swarm, "--set", f"target.rounds={soon}")
        swarm.wait_until(lambda: swarm.poll(swarm.peers[0])[0].phase == "done", "it is over", 120)
        assert swarm.peers[0].is_running, swarm.describe()
        end = swarm.poll(swarm.peers[0])[0].round  # at least `soon`: a revision may come too late for its round
        organiser.steer(swarm, "--set", f"target.rounds={end + 3}")
        swarm.wait_until(lambda: swarm.poll(swarm.peers[0])[0].round == end + 3, "it goes on", 120)
        swarm.peers[1].start(swarm.peers[0].addresses()[:1])
        swarm.wait_until(lambda: not any(peer.is_running for peer in swarm.peers), "both end", 120)
        assert {status.round for status in swarm.poll()} == {end + 3}, swarm.describe()
