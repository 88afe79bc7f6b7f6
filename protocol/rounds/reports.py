"""What members say between the roster and the decision of a round, each body checked in full."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Blob, check_digest
from protocol.errors import MalformedError
from protocol.identity import PeerId, public_key
from protocol.rounds.statements import (
    MAX_CONTRIBUTIONS,
    MAX_HELD_BLOBS,
    Digest,
    OpenNested,
    SignedMessage,
    ContributionLimits,
    check_ascending,
    check_count,
    check_part_count,
    check_round,
)

MAX_VOTES = 4096


@dataclass(frozen=True)
class Inventory:
    """Which blobs a member holds of a roster; NO_ROSTER: it only tells its view.

    `lock`: the newest proposal that it acknowledged; empty where there is none.
    """

    round: int
    view: int
    roster: Digest
    blobs: tuple[Digest, ...]
    lock: Digest = b""

    def to_wire(self) -> wire.Holding:
        return wire.Holding(round=self.round, view=self.view, roster=self.roster, blobs=self.blobs, lock=self.lock)

    @classmethod
    def from_wire(cls, body: wire.Holding, limits: ContributionLimits, open_nested: OpenNested) -> Self:
        check_round(body.round, body.roster)
        check_count(len(body.blobs), MAX_HELD_BLOBS, "blobs")
        for digest in body.blobs:
            check_digest(digest)
        check_ascending(body.blobs, "held blobs")
        if body.lock:
            check_digest(body.lock)
        return cls(body.round, body.view, body.roster, tuple(body.blobs), body.lock)


@dataclass(frozen=True)
class Acknowledgement:
    """The sender holds all that it takes to apply a proposal, and acknowledges nothing older any more."""

    round: int
    view: int
    proposal: Digest

    def to_wire(self) -> wire.Acknowledgement:
        return wire.Acknowledgement(round=self.round, view=self.view, proposal=self.proposal)

    @classmethod
    def from_wire(cls, body: wire.Acknowledgement, limits: ContributionLimits, open_nested: OpenNested) -> Self:
        check_round(body.round, body.proposal)
        return cls(body.round, body.view, body.proposal)


@dataclass(frozen=True)
class CommitCertificate:
    """Acknowledgements of one proposal, ascending by sender; those of a majority decide it, whoever passes them on.

    Their bodies are all the same, so only senders and signatures stand in it.
    """

    round: int
    view: int
    proposal: Digest
    acknowledgements: tuple[SignedMessage[Acknowledgement], ...]

    @cached_property
    def by_sender(self) -> dict[PeerId, SignedMessage[Acknowledgement]]:
        return {entry.sender: entry for entry in self.acknowledgements}

    def to_wire(self) -> wire.Decision:
        return wire.Decision(
            round=self.round,
            view=self.view,
            proposal=self.proposal,
            peers=[acknowledgement.sender for acknowledgement in self.acknowledgements],
            signatures=[acknowledgement.signed.signature for acknowledgement in self.acknowledgements],
        )

    @classmethod
    def from_wire(cls, body: wire.Decision, limits: ContributionLimits, open_nested: OpenNested) -> Self:
        check_round(body.round, body.proposal)
        check_count(len(body.peers), MAX_VOTES, "acknowledgements")
        if len(body.peers) != len(body.signatures):
            raise MalformedError(f"a decision of {len(body.peers)} peers and {len(body.signatures)} signatures")
        check_ascending(body.peers, "acknowledgements")
        votes = tuple(open_nested(signed) for signed in _acknowledgement_envelopes(body))
        return cls(body.round, body.view, body.proposal, votes)


def _acknowledgement_envelopes(body: wire.Decision) -> list[wire.Signed]:
    """The envelopes of a decision's acknowledgements."""
    said = Acknowledgement(body.round, body.view, body.proposal).to_wire().SerializeToString(deterministic=True)
    return [
        wire.Signed(kind="acknowledgement", peer=peer, body=said, signature=signature)
        for peer, signature in zip(body.peers, body.signatures, strict=True)
    ]


@dataclass(frozen=True)
class ReducerAssignment:
    """Whose contributions the reducers shall sum, and who reduces which part."""

    round: int
    view: int
    roster: Digest
    attempt: int
    included: tuple[PeerId, ...]
    reducers: tuple[PeerId, ...]

    def to_wire(self) -> wire.Inclusion:
        return wire.Inclusion(
            round=self.round,
            view=self.view,
            roster=self.roster,
            attempt=self.attempt,
            included=self.included,
            reducers=self.reducers,
        )

    @classmethod
    def from_wire(cls, body: wire.Inclusion, limits: ContributionLimits, open_nested: OpenNested) -> Self:
        check_round(body.round, body.roster)
        check_count(len(body.included), MAX_CONTRIBUTIONS, "included peers")
        if not body.included:
            raise MalformedError("an inclusion that names nobody")
        check_part_count(len(body.reducers), limits, "an inclusion")
        for peer in {*body.included, *body.reducers}:
            public_key(peer)
        check_ascending(body.included, "included peers")
        return cls(body.round, body.view, body.roster, body.attempt, tuple(body.included), tuple(body.reducers))


@dataclass(frozen=True)
class ReducedPart:
    """One part has been reduced and encoded."""

    round: int
    view: int
    roster: Digest
    attempt: int
    part: int
    blob: Blob

    def to_wire(self) -> wire.Part:
        return wire.Part(
            round=self.round,
            view=self.view,
            roster=self.roster,
            attempt=self.attempt,
            part=self.part,
            blob=self.blob.to_wire(),
        )

    @classmethod
    def from_wire(cls, body: wire.Part, limits: ContributionLimits, open_nested: OpenNested) -> Self:
        check_round(body.round, body.roster)
        if body.part >= limits.parts:
            raise MalformedError(f"part {body.part} where there are at most {limits.parts}")
        return cls(body.round, body.view, body.roster, body.attempt, body.part, limits.read_blob(body.blob))
