"""The settings of one round, which follow from the manifest."""

from dataclasses import dataclass

from protocol.consensus.topology import Topology
from protocol.manifest import RunId


@dataclass(frozen=True)
class RoundSettings:
    """The topology and the times of a round, in seconds.

    `vote_memory`: how long a member that vanished without a goodbye still counts in every majority. Within that time
    only one side of a split network can commit; after it, each side continues alone, and the chains decide when they
    meet. `roster_quorum`: the share of the awaited members whose contributions close the roster at once (1.0: all; less
    as with backup workers and buffered aggregation, arXiv 2106.06639). Later contributions join the next round.
    """

    topology: Topology
    grace: float
    leader_timeout: float
    exchange_timeout: float
    vote_memory: float = 30.0
    roster_quorum: float = 1.0

    @property
    def run_id(self) -> RunId:
        """Return the run to which the round belongs."""
        return self.topology.run_id

    @property
    def parts(self) -> int:
        """Return how many parts each contribution consists of."""
        return self.topology.parts

    @property
    def exchange_seconds(self) -> float:
        """Return the longest time that all exchanges of blobs in a round may take."""
        return self.exchange_timeout * self.topology.exchange_count
