"""Hold what a run asks of the round loop. PURE."""

from collections.abc import Callable
from dataclasses import dataclass

from protocol.consensus.messages import ContributionLimits
from protocol.consensus.settings import RoundSettings
from protocol.identity import PeerId


@dataclass(frozen=True)
class RoundOptions:
    """What all rounds of a run have in common.

    Args:
        settings: a round's settings by its number.
    """

    peer_id: PeerId
    settings: Callable[[int], RoundSettings]
    limits: ContributionLimits


@dataclass(frozen=True)
class LoopOptions:
    """What a run asks of each peer.

    Args:
        min_peers: trainers with which the run begins.
        expiry: seconds for which a run that has begun waits for the peers that it had.
        has_contacts: whether somebody was named whom we can ask for the run.
        compares_states: whether all peers on one head must have the same state.
    """

    round: RoundOptions
    target_rounds: int | None = None
    target_tokens: int | None = None
    min_peers: int = 1
    expiry: float = 0.0
    has_contacts: bool = False
    compares_states: bool = True
