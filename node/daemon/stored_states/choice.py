"""Choose what to store from the peers' records: the state, the stage, and the rounds. PURE.

State: a record is a claim, so with three or more peers one alone decides nothing. A head counts if two peers report it,
and its state if more than half of them do. Trainers computed their state; hosts only repeat it, and count where no
trainer is left. A stored final state is replaced only by one that two peers report. The certificates of the chain are
checked before the state is stored (`state_store.py`).

Stage: a trainer of a pipeline stores, besides its own, the stage that the fewest trainers store. All peers choose from
the same records, so the choices spread: ties go to the stage with the fewest trainers, then by a hash of the peer. A
peer keeps its choice until another stage has at least two fewer stores, and then the peer with the lowest hash moves
first. Hosts store all stages and need no ticket, so only trainers count.

Rounds: multiples of a power of two (`RoundFilter`). Stores of different stages choose the same rounds without a message
to each other, so their states join to one model. The power grows until downloads take a small share of the time.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from node.daemon.steering.revision_store import RoundClock
from node.loop.peers.swarm_snapshot import PeerState, SwarmSnapshot
from protocol.consensus.chain import ChainHead
from protocol.consensus.messages.signed import Digest
from protocol.identity import PeerId
from protocol.membership.record_fields import parse_kept_states, record_of_stage
from protocol.murmur_pb2 import PeerRecord

MAX_PERIOD = 1024  # rounds


@dataclass(frozen=True)
class StageUse:
    """The trainers and the stores of a stage, without this peer."""

    trainers: int = 0
    has_state: bool = False
    keepers: frozenset[PeerId] = frozenset()


def choose_kept_stage(
    records: Mapping[PeerId, PeerRecord], stages: int, me: PeerId, own_stage: int, current: int | None
) -> int | None:
    """Return the stage to store from now on; `None` while no other stage has a state.

    Args:
        records: the live peers.
        stages: number of stages of the run.
        me: our own id.
        own_stage: the stage that we train.
        current: the stage that we store now.
    """
    uses = {stage: _use_of(records, stage, me) for stage in range(stages) if stage != own_stage}
    wanted = [stage for stage, use in uses.items() if use.has_state or stage == current]
    if not wanted:
        return None
    best = min(wanted, key=lambda stage: (len(uses[stage].keepers), uses[stage].trainers, _draw(me, stage)))
    if current is None or current not in uses:
        return best
    gains = len(uses[current].keepers) > len(uses[best].keepers)
    return best if gains and _moves_first(records, uses[current], best, me, current) else current


def _moves_first(records: Mapping[PeerId, PeerRecord], left: StageUse, best: int, me: PeerId, current: int) -> bool:
    """Return whether we have the lowest hash of the peers that could stop storing the stage `left`."""
    movable = (peer for peer in left.keepers if records[peer].stage and record_of_stage(records[peer], best) is None)
    return all(_draw(me, current) < _draw(peer, current) for peer in movable)


def _use_of(records: Mapping[PeerId, PeerRecord], stage: int, me: PeerId) -> StageUse:
    others = {peer: record for peer, record in records.items() if peer != me and not record.leaving}
    trainers = [seen for record in others.values() if (seen := record_of_stage(record, stage)) is not None]
    keepers = frozenset(peer for peer, record in others.items() if stage in _kept_by(record))
    has_state = bool(keepers) or any(entry.round for entry in trainers)
    return StageUse(len(trainers), has_state, frozenset(peer for peer in keepers if others[peer].role == "trainer"))


def _kept_by(record: PeerRecord) -> Iterable[int]:
    return [kept.stage for kept in parse_kept_states(record.kept)] if record.kept else ()


def _draw(peer: PeerId, stage: int) -> bytes:
    """Return a hash that orders the peers differently at each stage."""
    return hashlib.sha256(f"murmur keeps {stage} {peer}".encode()).digest()


class RoundFilter:
    """Chooses the rounds whose states all stores of one node fetch.

    Args:
        min_seconds: minimal time between two chosen rounds.
        link_share: maximal share of the time that downloads may take.
    """

    def __init__(self, min_seconds: float, link_share: float) -> None:
        self._clock = RoundClock()
        self._min_seconds = min_seconds
        self._link_share = link_share
        self._fetch_seconds: dict[str, float] = {}

    @property
    def period(self) -> int:
        """Return the number of rounds from one chosen round to the next, a power of two."""
        if not self._clock.seconds:
            return 1
        pause = max(self._min_seconds, sum(self._fetch_seconds.values()) / self._link_share)
        needed = min(MAX_PERIOD, max(1.0, pause / self._clock.seconds))
        return int(2 ** math.ceil(math.log2(needed)))

    def is_chosen(self, round_number: int) -> bool:
        return round_number % self.period == 0

    def observe(self, round_number: int, now: float) -> None:
        """Record a round that enough peers of a stage report."""
        self._clock.observe(round_number, now)

    def record_fetch(self, run: str, seconds: float) -> None:
        """Record how long the last download of a run's state took."""
        self._fetch_seconds[run] = seconds

    def forget(self, run: str) -> None:
        """Stop counting the downloads of a run."""
        self._fetch_seconds.pop(run, None)


@dataclass(frozen=True)
class StateOffer:
    """A state that enough peers report, and the peers to fetch it from."""

    head: ChainHead
    state: Digest
    holders: tuple[PeerId, ...]


@dataclass(frozen=True)
class ChoiceRules:
    """The rules of a run.

    Args:
        peer_id: our own id.
        has_one_state: whether all peers on one head must have the same state.
        is_final: returns whether a head is at the target of the run.
    """

    peer_id: PeerId
    has_one_state: bool
    is_final: Callable[[ChainHead], bool]


def choose_state(
    rules: ChoiceRules,
    snapshot: SwarmSnapshot,
    own: ChainHead | None,
    voters: frozenset[PeerId] = frozenset(),
    avoided: Collection[tuple[ChainHead, Digest]] = (),
) -> StateOffer | None:
    """Return the best state that enough peers report; `None` if it is not better than our own.

    Args:
        rules: the rules of the run.
        snapshot: the peers.
        own: the head of the state that we hold.
        voters: the voters that we know; while one of them is live, only voters count.
        avoided: heads and states that no peer could prove recently; the peers that name them are no witnesses.
    """
    others = {peer: state for peer, state in snapshot.peers.items() if peer != rules.peer_id and _has_state(state)}
    known = {peer: state for peer, state in others.items() if (state.head, state.state) not in avoided}
    trainers = {peer: state for peer, state in known.items() if state.is_trainer}
    witnesses = {peer: state for peer, state in trainers.items() if peer in voters} or trainers or known
    is_safe = len(witnesses) < 3 and not (own is not None and rules.is_final(own))
    counts = Counter(state.head for state in witnesses.values() if state.head is not None)
    heads = [head for head, count in counts.items() if count >= (1 if is_safe else 2)]
    better = [head for head in heads if own is None or head.tokens > own.tokens]
    for head in sorted(better, key=lambda head: (head.tokens, head.digest), reverse=True):
        at_head = {peer: state for peer, state in witnesses.items() if state.head == head}
        if (state := _agreed_state(at_head, rules.has_one_state)) is not None:
            holders = tuple(peer for peer, other in known.items() if (other.head, other.state) == (head, state))
            return StateOffer(head, state, holders)
    return None


def _has_state(state: PeerState) -> bool:
    return state.head is not None and state.head.round > 0 and state.state != b""


def _agreed_state(at_head: Mapping[PeerId, PeerState], has_one_state: bool) -> Digest | None:
    counts = Counter(state.state for state in at_head.values())
    state = min(counts, key=lambda candidate: (-counts[candidate], candidate))
    return state if not has_one_state or 2 * counts[state] > counts.total() else None
