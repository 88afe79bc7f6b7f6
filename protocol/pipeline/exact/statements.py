"""Write statements: the microbatches that a server of a stage has counted in the open exact step.

They are small, and the newest one holds.
"""

from dataclasses import dataclass
from typing import Literal, Self, get_args

from protocol import murmur_pb2 as wire
from protocol.errors import MalformedError
from protocol.manifest.run import RunId
from protocol.pipeline.exact.ledger import StepLedger
from protocol.pipeline.messages import MAX_LIFE, check_bound, check_run
from protocol.signing import MAX_ROUND

Phase = Literal[
    "open",  # it adds gradients
    "sealed",  # all microbatches count at all stages, so it adds nothing more
    "offered",  # its contribution has this ledger
]
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True)
class Statement:
    """The statement of one life of a server about its sum in a round; `version` grows with each change."""

    run: RunId
    round: int
    life: int
    version: int
    ledger: StepLedger
    phase: Phase = "open"

    @property
    def age(self) -> tuple[int, int, int]:
        """Return what orders the statements of one server."""
        return self.round, self.life, self.version

    def to_wire(self) -> wire.StepStatement:
        return wire.StepStatement(
            run=bytes.fromhex(self.run),
            round=self.round,
            life=self.life,
            version=self.version,
            ledger=self.ledger.to_bytes(),
            phase=PHASES.index(self.phase),
        )

    @classmethod
    def from_wire(cls, body: wire.StepStatement, count: int) -> Self:
        """Return a checked statement about a step of `count` microbatches. Raises MalformedError."""
        check_run(body.run)
        check_bound(body.round, MAX_ROUND, "round")
        check_bound(body.life, MAX_LIFE, "life")
        if body.phase >= len(PHASES):
            raise MalformedError("an unknown phase of a step")
        ledger = StepLedger.from_bytes(body.ledger, count)
        return cls(body.run.hex(), body.round, body.life, body.version, ledger, PHASES[body.phase])
