"""The sums that a peer computes in a round: of the parts that it reduces, and of those that it checks."""

from protocol.blobs.blob import Blob
from protocol.consensus.events import Reduce
from protocol.consensus.knowledge import RoundKnowledge
from protocol.consensus.messages.contributions import Contribution
from protocol.consensus.messages.signed import Digest, SignedMessage
from protocol.consensus.reduction.evidence import digest_inputs

PartSum = tuple[int, Digest]  # a part, and the digest of its inputs


class Sums:
    """The sums that a peer has requested from its driver in one round; owned by the round state."""

    def __init__(self) -> None:
        self._requested: list[PartSum] = []  # the index is the request id of the Reduce
        self._results: dict[PartSum, Blob] = {}

    def record(self, request_id: int, blob: Blob) -> None:
        """Record the answer to a request."""
        self._results[self._requested[request_id]] = blob

    def result(self, part: int, inputs: Digest) -> Blob | None:
        """Return the sum of one part of these inputs, if it is computed."""
        return self._results.get((part, inputs))

    def request(
        self, part: int, contributions: tuple[SignedMessage[Contribution], ...], knowledge: RoundKnowledge
    ) -> Reduce | None:
        """Return a request for a sum, once this peer holds that part of all contributions; each one only once."""
        wanted = part, digest_inputs(entry.digest for entry in contributions)
        part_blobs = [entry.body.part_blobs[part] for entry in contributions]
        if wanted in self._requested or not knowledge.has_all_parts(knowledge.me, part_blobs):
            return None
        self._requested.append(wanted)
        return Reduce(part, len(self._requested) - 1, contributions)
