"""The organiser of a simulated run: revisions that reach some peers at a random time, and what must hold of them.

All peers on one head have adopted the same revisions and give the next round the same manifest. No round is made while
the run is paused, unless its commit lets the run go on.
"""

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING

from node.loop.steering import Steering
from protocol.consensus.chain import ChainHead
from protocol.consensus.messages.contributions import Commit
from protocol.consensus.messages.signed import Digest
from protocol.manifest.sections import RoundSection
from protocol.steering import (
    REFERENCE_MANIFEST,
    Revision,
    RevisionLog,
    SignedRevision,
    Value,
    encode_changes,
    manifest_of_round,
)
from tests.simulation.virtual.network import ORGANISER, make_signer

if TYPE_CHECKING:
    from tests.simulation.virtual.swarm import SimulatedSwarm

MANIFEST = REFERENCE_MANIFEST.model_copy(
    update={"round": RoundSection(grace=2.0, leader_timeout=1.5, exchange_timeout=10.0)}
)
STEERED_SHARE = 0.4  # of the seeds
LAST_PUBLICATION = 40.0  # seconds: whoever lives then knows all, and so does whoever comes back


class Organiser:
    """Signs revisions and hands them to peers. `log` has all of them; two may contradict each other."""

    def __init__(self, swarm: "SimulatedSwarm") -> None:
        self.log = RevisionLog()
        self._swarm = swarm
        self._manifests: dict[Digest, tuple[Digest, str]] = {}  # by head: the newest revision, and the manifest

    def plan(self, seed: int) -> None:
        """Plan the revisions of a seed, in a share of the seeds."""
        chance = random.Random(f"revisions {seed}")
        if chance.random() >= STEERED_SHARE:
            return
        for _ in range(chance.choice([1, 1, 2])):
            kind, number = chance.choice(["settings", "settings", "pause", "conflict"]), chance.randint(0, 3)
            time = chance.uniform(0.0, 12.0)
            self._later(time, kind, number, chance)
        self._swarm.network.schedule(LAST_PUBLICATION, lambda: self._settle(chance))

    def _settle(self, chance: random.Random) -> None:
        """Let a run go on that is still paused, because the commits chose another list, and tell all."""
        if any(peer.steering.is_paused for peer in self._swarm.alive()):
            self._revise({"paused": False}, 0, chance)
        self._hand_out(1.0, chance)

    def _later(self, time: float, kind: str, number: int, chance: random.Random) -> None:
        schedule = self._swarm.network.schedule
        if kind == "pause":
            schedule(time, lambda: self._revise({"paused": True}, number, chance))
            schedule(time + chance.uniform(0.5, 9.0), lambda: self._revise({"paused": False}, 0, chance))
        elif kind == "conflict":
            schedule(time, lambda: self._revise({"round.grace": 1.0}, number, chance, follows=0))
            schedule(time + 0.1, lambda: self._revise({"round.grace": 4.0}, number, chance, follows=0))
        else:
            schedule(time, lambda: self._revise({"round.grace": chance.uniform(1.0, 4.0)}, number, chance))

    def _revise(
        self, changes: Mapping[str, Value], number: int, chance: random.Random, follows: int | None = None
    ) -> None:
        """Sign a revision after the newest one, or after the first `follows`, and hand it to some peers."""
        heads = [peer.chain.head for peer in self._swarm.alive()]
        adopted = max(heads, key=lambda head: head.tokens).revision if heads else b""
        before = self.log.list_to(self.log.newest(adopted)) or ()
        before = before if follows is None else before[:follows]
        previous, now = before[-1].digest if before else b"", self._swarm.network.now
        revision = Revision(len(before) + 1, previous, number, encode_changes(changes), now)
        signed = make_signer(ORGANISER)("revision", revision.to_wire())
        self.log.add(self._swarm.network.open(signed))
        self._swarm.network.record("organiser", f"signs {revision}")
        self._hand_out(chance.choice([0.3, 0.6, 1.0]), chance)

    def _hand_out(self, share: float, chance: random.Random) -> None:
        """Hand all revisions to a share of the living peers, one at least."""
        alive = self._swarm.alive()
        for peer in chance.sample(alive, max(1, round(share * len(alive)))) if alive else ():
            if peer.name not in self._swarm.network.link.frozen:
                peer.learn(self.log.revisions)

    def check_head(self, head: ChainHead, steering: Steering) -> None:
        """Check that all peers on a head give the next round one manifest."""
        found = head.revision, steering.manifest_at(head.round).model_dump_json()
        assert self._manifests.setdefault(head.digest, found) == found, "two manifests of one round"

    def check_decided(self, commit: Commit, head: ChainHead) -> None:
        """Check that no round is made in a pause."""
        if commit.base == head.digest:
            newest, number = commit.adoption.newest, commit.round
            is_paused = self._is_paused(head.revision, number) and self._is_paused(newest, number)
            assert not is_paused, "a round of a run that is paused"

    def _is_paused(self, newest: Digest, number: int) -> bool:
        revisions: tuple[SignedRevision, ...] = self.log.list_to(newest) or ()
        return manifest_of_round(MANIFEST, (entry.body for entry in revisions), number).is_paused
