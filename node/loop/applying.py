"""Describe a decided commit while the round loop applies it to its state. PURE."""

from dataclasses import dataclass

from node.daemon.state.outer_state import SignedContributions
from node.trainer.ipc.channel import ContributionOutcome
from protocol.consensus.history.certified import CertifiedCommit


@dataclass
class Applying:
    """A commit that is being applied to our state; `counts`: it changes the state, which a void round does not."""

    commit: CertifiedCommit
    counts: bool = True
    contributions: SignedContributions = ()
    outcome: ContributionOutcome = "none"
