"""The states of other stages that a peer of a pipeline keeps, as one field of its record names them."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Self

from protocol import murmur_pb2 as wire
from protocol.errors import MalformedError
from protocol.membership.records.stage_entries import read_field, require_head, require_order

MAX_KEPT_STATES: Final = 8  # in one record


@dataclass(frozen=True, order=True)
class KeptState:
    """A state of a stage (counted from 0) and the head of its chain; `state` is empty before the first one."""

    stage: int
    round: int
    digest: bytes
    tokens: int
    state: bytes = b""

    def to_wire(self) -> wire.KeptState:
        return wire.KeptState(
            stage=self.stage + 1,
            round=self.round,
            digest=self.digest,
            chain_tokens=self.tokens,
            state_digest=self.state,
        )

    @classmethod
    def from_wire(cls, body: wire.KeptState) -> Self:
        """Check an entry. Raises MalformedError."""
        require_head(body)
        if not body.digest:
            raise MalformedError("a kept state without the digest of its chain")
        return cls(body.stage - 1, body.round, body.digest, body.chain_tokens, body.state_digest)


def encode_kept_states(states: Iterable[KeptState]) -> bytes:
    """Return the field of the record; at most MAX_KEPT_STATES of one stage each."""
    return wire.KeptStates(states=[state.to_wire() for state in sorted(states)]).SerializeToString(deterministic=True)


@lru_cache(maxsize=4096)
def parse_kept_states(data: bytes) -> tuple[KeptState, ...]:
    """Return the entries of the field. Raises MalformedError."""
    listing = read_field(wire.KeptStates(), data)
    states = tuple(KeptState.from_wire(entry) for entry in listing.states)
    require_order([state.stage for state in states], MAX_KEPT_STATES)
    return states
