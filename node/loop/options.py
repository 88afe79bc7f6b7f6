"""Define the options of the round loop. PURE."""

from collections.abc import Callable
from dataclasses import dataclass

from node.loop.exact_rounds import ExactOptions
from node.loop.steering import Steering
from protocol.admission import Ticket
from protocol.conduct import PeerConvicted, Proof
from protocol.consensus.messages.contributions import ContributionLimits
from protocol.consensus.messages.signed import SignedMessage
from protocol.consensus.settings import RoundSettings
from protocol.identity import PeerId
from protocol.signing import TrustPoint


@dataclass(frozen=True)
class RoundOptions:
    """The options that all rounds of a run have in common.

    Args:
        peer_id: our own id.
        settings: maps a round number to the settings of that round.
        limits: the limits that every contribution must keep.
        ticket: our ticket, in a run of tickets.
        audit_secret: random bytes that nobody else knows; they draw the sums that we check.
    """

    peer_id: PeerId
    settings: Callable[[int], RoundSettings]
    limits: ContributionLimits
    audit_secret: bytes = b""
    ticket: SignedMessage[Ticket] | None = None


@dataclass(frozen=True)
class SyncOptions:
    """How a peer follows other chains.

    Args:
        compares_states: whether all peers on one head must have the same state.
        trust: the point through which the run's chain passes, if the user has one.
        requires_trust: whether a chain must show that it passes through this point.
        accepts_jumps: whether a chain may replace many rounds of ours.
        lacks_state: whether we begin without a state, so that a peer must send us one.
    """

    compares_states: bool = True
    trust: TrustPoint | None = None
    requires_trust: bool = True
    accepts_jumps: bool = False
    lacks_state: bool = False


@dataclass(frozen=True)
class LoopOptions:
    """The options of a run, the same for each of its peers, and whether this one has contacts.

    Args:
        round: the options of its rounds.
        steering: the run's manifest by round, with its target.
        min_peers: number of trainers with which the run begins.
        expiry: seconds for which a restarted peer waits for that number of trainers.
        has_contacts: whether the user named a peer to ask for the run.
        sync: how this peer follows other chains.
        state_bytes: size of a state.
        proofs: the proofs of misdeeds that we know.
        convictions: the keys that audits excluded, with the findings.
        stays: whether this peer serves the final state until it is stopped, as a host does.
        exact: our part of a pipeline with exact steps.
        was_copied: whether our folder was copied or restored, so that our key may have signed more than we remember.
    """

    round: RoundOptions
    steering: Steering
    min_peers: int = 1
    expiry: float = 0.0
    has_contacts: bool = False
    sync: SyncOptions = SyncOptions()
    state_bytes: int = 0
    stays: bool = False
    proofs: tuple[SignedMessage[Proof], ...] = ()
    convictions: tuple[PeerConvicted, ...] = ()
    exact: ExactOptions | None = None
    was_copied: bool = False

    @property
    def compares_states(self) -> bool:
        """Return whether all peers on one head must have the same state."""
        return self.sync.compares_states
