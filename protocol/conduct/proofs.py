"""Proofs of misdeeds: two statements that one key signed although each excludes the other.

An honest peer signs at most one statement for each of these places, also over restarts, because its vote and its
contribution are on disk before anybody sees them:

    contribution   one in a round that continues the same chain
    roster         one in a view
    commit         one in a view
    part           one sum of the same inputs

Anybody can check a proof with the signatures alone, so a peer needs to trust nobody who passes one on. A node that runs
with a copied key is guilty as well: nobody can tell it from a liar.

Two acknowledgements of one view are no proof, because two leaders may lead a view, and a member may follow the stronger
one after the other.
"""

from dataclasses import dataclass
from typing import Any, Self

from protocol import murmur_pb2 as wire
from protocol.consensus.messages.contributions import ContributionLimits
from protocol.consensus.messages.signed import OpenNested, SignedMessage
from protocol.errors import MalformedError
from protocol.identity import PeerId

KIND = "proof"
MAX_PROOF_BYTES = 512 * 1024
Place = tuple[str | int | bytes, ...]


def place_of(message: SignedMessage[Any]) -> Place | None:
    """Return the place for which a peer signs one statement only; none if it may sign several."""
    kind, body = message.signed.kind, message.body
    match kind:
        case "contribution":
            return kind, body.round, body.base
        case "roster" | "commit":
            return kind, body.round, body.base, body.view
        case "part":
            return kind, body.round, body.part, body.inputs
    return None


def _value_of(message: SignedMessage[Any]) -> object:
    """Return the part of a statement that must be the same in all statements for one place."""
    return message.body.blob if message.signed.kind == "part" else message.digest


def excludes(first: SignedMessage[Any], second: SignedMessage[Any]) -> bool:
    """Return whether one peer signed both statements although each excludes the other."""
    place = place_of(first)
    is_same_place = place is not None and place == place_of(second) and first.sender == second.sender
    return is_same_place and _value_of(first) != _value_of(second)


@dataclass(frozen=True)
class Proof:
    """Two statements that exclude each other; the message around them is signed by a peer that found them."""

    first: SignedMessage[Any]
    second: SignedMessage[Any]

    @property
    def round(self) -> int:
        """Return the round of the misdeed."""
        return int(self.first.body.round)

    @property
    def culprit(self) -> PeerId:
        """Return the key that signed both."""
        return self.first.sender

    @property
    def is_valid(self) -> bool:
        """Return whether the statements exclude each other."""
        return excludes(self.first, self.second)

    def describe(self) -> str:
        """Return the misdeed in plain words."""
        name = {"part": "sums of one part"}.get(self.first.signed.kind, f"{self.first.signed.kind}s")
        return f"two different {name} in round {self.round + 1}"

    def to_wire(self) -> wire.Proof:
        return wire.Proof(statements=[self.first.signed, self.second.signed])

    @classmethod
    def from_wire(cls, body: wire.Proof, limits: ContributionLimits, open_nested: OpenNested) -> Self:
        if len(body.statements) != 2 or any(signed.kind == KIND for signed in body.statements):
            raise MalformedError("a proof that does not consist of two statements")
        first, second = (open_nested(signed) for signed in body.statements)
        proof = cls(first, second)
        if not proof.is_valid:
            raise MalformedError("a proof whose statements do not exclude each other")
        return proof
