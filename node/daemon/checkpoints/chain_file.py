"""The chain in a checkpoint: its head as JSON, and its last commits with their certificates in a file of their own.

The JSON also has the electorate of the last head that was certified strongly, to which the commits may not reach back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.message import DecodeError

from protocol import murmur_pb2 as wire
from protocol.consensus.history.certified import ChainLog
from protocol.consensus.history.chain import Chain, ChainHead
from protocol.consensus.messages.contributions import ContributionLimits
from protocol.consensus.messages.kinds import nested_reader
from protocol.electorate import Electorate
from protocol.errors import CheckpointError, PeerFault
from protocol.manifest.sections import AdmissionSection

HEAD_KEY = "head"
STRONG_KEY = "strong_electorate"


@dataclass(frozen=True)
class SavedChain:
    """A chain as a checkpoint holds it: the table of its head, and the bytes of its log."""

    table: Mapping[str, Any]
    log: bytes

    @classmethod
    def of(cls, head: ChainHead, log: ChainLog, **more: object) -> "SavedChain":
        """Return a chain to save; `more` values go into the table with the head."""
        strong = {} if log.strong is None else {STRONG_KEY: log.strong.to_json()}
        table = {HEAD_KEY: head.to_json(), **strong, **more}
        return cls(table, log.to_wire().SerializeToString(deterministic=True))

    def restore(self, rule: AdmissionSection, limits: ContributionLimits) -> Chain:
        """Return the chain. Raises CheckpointError if this program has not written it."""
        head = ChainHead.from_json(self.table[HEAD_KEY])
        try:
            log = ChainLog.from_wire(wire.ChainLog.FromString(self.log), rule, limits, nested_reader(limits))
            strong = Electorate.from_json(self.table[STRONG_KEY], rule) if STRONG_KEY in self.table else None
        except (PeerFault, DecodeError) as error:
            raise CheckpointError(f"the commits in the checkpoint are damaged: {error}; use an earlier one") from error
        if log.electorates[-1].round != head.round:
            raise CheckpointError("the voters in the checkpoint are of another round; use an earlier checkpoint")
        return Chain(head, replace(log, strong=strong))
