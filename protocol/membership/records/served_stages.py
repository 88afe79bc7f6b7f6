"""The stages of a pipeline that a peer serves, as its record names them.

The record of a peer has the head of one stage in its own fields, and those of the others, if it trains several, in one
field of bytes. Code that asks for a stage sees the record
as if the peer served that stage alone.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Final, Self

from protocol import murmur_pb2 as wire
from protocol.errors import MalformedError
from protocol.membership.records.stage_entries import read_field, require_head, require_order
from protocol.murmur_pb2 import PeerRecord

MAX_MORE_STAGES: Final = 7  # in one record, beside its own


@dataclass(frozen=True)
class ServedStage:
    """A stage (counted from 0), and the fields of a record that concern it; no digest before it has a state."""

    stage: int
    stage_life: int = 0
    stage_rate: float = 0.0
    round: int = 0
    digest: bytes = b""
    chain_tokens: int = 0
    state_digest: bytes = b""

    def to_wire(self) -> wire.ServedStage:
        return wire.ServedStage(**asdict(self) | {"stage": self.stage + 1})

    @classmethod
    def from_wire(cls, body: wire.ServedStage) -> Self:
        """Check an entry. Raises MalformedError."""
        require_head(body)
        if not (math.isfinite(body.stage_rate) and body.stage_rate >= 0):
            raise MalformedError("a served stage with a rate that is negative or not finite")
        head = (body.round, body.digest, body.chain_tokens, body.state_digest)
        return cls(body.stage - 1, body.stage_life, body.stage_rate, *head)


def encode_served_stages(stages: Iterable[ServedStage]) -> bytes:
    """Return the field of the record; at most MAX_MORE_STAGES of different numbers."""
    listed = sorted(stages, key=lambda entry: entry.stage)
    return wire.ServedStages(stages=[entry.to_wire() for entry in listed]).SerializeToString(deterministic=True)


@lru_cache(maxsize=4096)
def parse_served_stages(data: bytes) -> tuple[ServedStage, ...]:
    """Return the entries of the field. Raises MalformedError."""
    listing = read_field(wire.ServedStages(), data)
    served = tuple(ServedStage.from_wire(entry) for entry in listing.stages)
    require_order([entry.stage for entry in served], MAX_MORE_STAGES)
    return served


def records_by_stage(record: PeerRecord) -> Iterator[PeerRecord]:
    """Yield the record once for each stage that it names, as if the peer served that one alone."""
    yield record
    for entry in parse_served_stages(record.more_stages) if record.more_stages else ():
        if entry.stage + 1 != record.stage:
            yield _as_of(record, entry)


def record_of_stage(record: PeerRecord, stage: int) -> PeerRecord | None:
    """Return the record of a trainer as that of one stage; None if it does not serve it."""
    if record.role != "trainer":
        return None
    return next((each for each in records_by_stage(record) if each.stage == stage + 1), None)


def _as_of(record: PeerRecord, entry: ServedStage) -> PeerRecord:
    seen = PeerRecord()
    seen.CopyFrom(record)
    seen.more_stages = b""
    for name, value in (asdict(entry) | {"stage": entry.stage + 1}).items():
        setattr(seen, name, value)
    return seen
