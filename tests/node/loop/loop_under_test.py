"""A round loop, its clock and its actions, for tests that play the swarm."""

from collections.abc import Iterable
from typing import Any

from node.loop.actions import (
    LoopAction,
)
from node.loop.contributions import ContributionTracker
from node.loop.events import (
    CommitApplied,
    CommitComputed,
    HeadPublished,
    LoopEvent,
    Started,
    SwarmChanged,
    TimePassed,
    TrainerStarted,
)
from node.loop.options import LoopOptions, RoundOptions
from node.loop.peers.swarm_snapshot import PeerState, SwarmSnapshot
from node.loop.round_loop import RoundLoop
from node.loop.round_session import RoundSession
from node.loop.steering import Steering
from protocol.blobs.blob import Blob
from protocol.consensus.chain import CertifiedCommit, Chain
from protocol.consensus.messages.contributions import Commit
from protocol.consensus.messages.signed import SignedMessage
from protocol.consensus.pacing import Pacing
from protocol.consensus.settings import RoundSettings
from protocol.consensus.topology import make_topology
from protocol.identity import PeerId
from protocol.manifest.sections import TargetSection
from protocol.signing import sign
from protocol.steering import RevisionLog
from tests.node.small_run import MANIFEST, PEERS, PROGRAM, RUN_ID, TERMS, certified, commit_of

ME, FRIEND, OTHER = (PEERS[number].peer_id for number in (1, 2, 3))
SETTINGS = RoundSettings(make_topology("gather", RUN_ID, 1), grace=1.0, leader_timeout=1.5, exchange_timeout=3.0)
BLOB = Blob.of(b"payload")
STATE = Blob.of(b"state")


class LoopUnderTest:
    """A loop, its clock, and all that it asked for."""

    def __init__(self, target_rounds: int | None = None, keepers: int = 0, **options: Any) -> None:
        round_options = RoundOptions(ME, lambda number: SETTINGS, TERMS)
        pacing = Pacing(1.0, lambda number: 10, 1)
        session = RoundSession(round_options, lambda kind, body: sign(PEERS[1], kind, RUN_ID, body), pacing, None)
        self.chain = Chain.from_genesis(RUN_ID)
        self.contributions = ContributionTracker(PROGRAM)
        manifest = MANIFEST.model_copy(update={"target": TargetSection(rounds=target_rounds, keepers=keepers)})
        self.log = RevisionLog()
        options["steering"] = Steering(manifest, self.chain, self.log)
        self.loop = RoundLoop(LoopOptions(round_options, **options), self.chain, b"mine", self.contributions, session)
        self.now = 0.0
        self.others: dict[PeerId, PeerState] = {}

    def post(self, *events: LoopEvent) -> list[LoopAction]:
        return [action for event in events for action in self.loop.handle(event, self.now)]

    def meet(self, **others: PeerState) -> list[LoopAction]:
        """Change what the swarm view knows of FRIEND and OTHER."""
        names = {"friend": FRIEND, "other": OTHER}
        self.others |= {names[name]: state for name, state in others.items()}
        return self.post(SwarmChanged(SwarmSnapshot({ME: PeerState(self.chain.head, self.loop.state), **self.others})))

    def start(self) -> list[LoopAction]:
        return [*self.meet(), *self.post(Started(), TrainerStarted())]

    def apply(self, commit: SignedMessage[Commit] | CertifiedCommit) -> list[LoopAction]:
        """Answer as effects do that apply a commit."""
        actions = self.post(CommitComputed(commit.body.contributions))
        entry = commit if isinstance(commit, CertifiedCommit) else certified(self.chain, commit, self.loop.state)
        self.chain.append(entry)
        return [*actions, *self.post(CommitApplied(b"next"), HeadPublished())]

    def pass_time(self, seconds: float) -> list[LoopAction]:
        self.now += seconds
        return self.post(TimePassed())


def of_kind(kind: type[Any], actions: Iterable[LoopAction]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def chain_of(rounds: int, peer: int = 2, base: Chain | None = None) -> tuple[Chain, list[CertifiedCommit]]:
    """Return a chain of rounds of one peer, whose states are those of LoopUnderTest."""
    chain = Chain.from_genesis(RUN_ID) if base is None else Chain(base.head, base.log)
    for number in range(chain.round, chain.round + rounds):
        commit = commit_of(chain.head, {peer: Blob.of(f"{peer} {number}".encode())})
        chain.append(certified(chain, commit, b"next" if number else b"mine"))
    return chain, list(chain.commits_since(chain.round - rounds) or ())


def head_state(chain: Chain) -> PeerState:
    return PeerState(chain.head, STATE.digest)
