"""Choose the stage whose state a peer of a pipeline keeps beside its own: the one with the fewest keepers. PURE.

All peers choose from the same records, so the choices spread: ties go to the stage with the fewest trainers, then by
the key of the peer. A peer stays with its choice until another stage lacks two keepers more, and of those that could
move, the one with the lowest draw does. Hosts keep all stages, and need no ticket, so only trainers count.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from protocol.identity import PeerId
from protocol.membership.records.kept_states import parse_kept_states
from protocol.membership.records.served_stages import record_of_stage
from protocol.murmur_pb2 import PeerRecord


@dataclass(frozen=True)
class StageUse:
    """The servers and the keepers of a stage, this peer excluded."""

    trainers: int = 0
    has_state: bool = False
    keepers: frozenset[PeerId] = frozenset()


def choose_kept_stage(
    records: Mapping[PeerId, PeerRecord], stages: int, me: PeerId, own_stage: int, current: int | None
) -> int | None:
    """Return the stage to keep from now on; None while no other stage has a state to keep.

    Args:
        records: the live peers.
        stages: how many the run has.
        me: our own id.
        own_stage: the stage that we train.
        current: the stage that we keep now.
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
    """Return whether no other keeper of the stage that we would leave goes before us."""
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
    """Return a number by which peers come in another order at each stage."""
    return hashlib.sha256(f"murmur keeps {stage} {peer}".encode()).digest()
