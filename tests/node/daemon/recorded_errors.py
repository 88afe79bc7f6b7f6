"""Stand-ins for what the parts of a replica talk to."""

from collections.abc import Callable, Iterable, Sequence

from node.monitoring.status import RecoveredErrorKind
from protocol.errors import PeerFault, UnreachableError
from protocol.identity import PeerId
from protocol.murmur_pb2 import Signed


class RecordedErrors:
    """Keeps what a StatusReporter would count and log."""

    def __init__(self) -> None:
        self.recovered: list[RecoveredErrorKind] = []
        self.lines: list[str] = []
        self.refused: list[tuple[PeerId, str]] = []

    def record_recovered(self, reason: RecoveredErrorKind, line: str) -> None:
        self.recovered.append(reason)
        self.lines.append(line)

    def record_refusal(self, peer: PeerId, first: PeerFault, *others: PeerFault) -> None:
        self.refused += [(peer, type(fault).__name__) for fault in (first, *others)]


class RecordedFaults:
    """Keeps faults in our own code, which would end the node."""

    def __init__(self) -> None:
        self.faults: list[BaseException] = []

    def fail(self, error: BaseException) -> None:
        self.faults.append(error)


class FixedSources:
    """A swarm view and relay client of peers that can all be reached, so that nobody is asked to relay."""

    def __init__(self, peers: Callable[[], Iterable[PeerId]]) -> None:
        self._peers = peers

    def other_trainers(self) -> list[PeerId]:
        return list(self._peers())

    def live_peers(self, chosen: Sequence[PeerId]) -> list[PeerId]:
        return [peer for peer in chosen if peer in self._peers()]

    def unreachable_peers(self) -> frozenset[PeerId]:
        return frozenset()

    def relay_candidates(self, owner: PeerId) -> Sequence[PeerId]:
        return ()

    async def request_relay(self, relay: PeerId, message: Signed, digest: bytes, seconds: float) -> None:
        raise UnreachableError(f"{relay} is not to be asked")
