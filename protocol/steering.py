"""Revisions: the changes of a run's manifest that its organiser signs while the run goes on. PURE.

A revision names its number, the digest of the revision before it, the round from which it holds, and new values for
keys of the manifest. `run.organiser_key` is the only key whose revisions count. Revisions form a list, and a list has
one meaning: the manifest of a round is the base manifest with the changes of all revisions that hold by then, in the
order of their numbers.

A change is one JSON object, for example {"target.rounds":200,"train.learning_rate":0.001}. `STEERABLE` lists its keys.
All others stay as they are: shapes, method, data, seed and the organiser's key decide what the weights mean, and the
intervals of gossip hold for every node at any moment, also for one that does not know the newest revision.

Each revision names the one before it, so the digest of a revision names a whole list. The organiser signs one list; if
two revisions continue the same one (an organiser who wrote from two machines, or whose first copy went astray), the
commits decide which one the run adopts, and until then every peer prefers the one that was written last.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, Self

from pydantic import ValidationError

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import check_digest
from protocol.consensus.messages.signed import Digest, SignedMessage
from protocol.errors import ForgedError, LimitError, MalformedError, StaleError, UsageError
from protocol.fault_words import describe_faults
from protocol.identity import PeerId
from protocol.manifest.run import Manifest, RunId
from protocol.signing import MAX_ROUND, open_signed, read_unverified

Value = bool | int | float | str | list[str] | dict[str, float] | None
REVISION_KIND = "revision"
PAUSED_KEY = "paused"  # not a key of the manifest: no rounds are made while it is true
NULLABLE_KEYS = ("target.rounds", "target.tokens", "data.weights")
STEERABLE: Final[Mapping[str, tuple[str, ...]]] = {
    "target": ("rounds", "tokens", "keepers"),
    "train": ("learning_rate", "warmup_steps", "decay_steps", "final_share", "weight_decay", "clip"),
    "anneal": ("share", "final_share"),
    "data": ("weights",),
    "round": ("grace", "leader_timeout", "exchange_timeout"),
    "checkpoint": ("every_rounds", "keep"),
    "admission": ("revoked",),
    "about": ("description", "organiser", "data", "licence", "url"),
}
MAX_REVISIONS = 128  # numbers of a run's revisions
MAX_REVISION_BYTES = 3072
MAX_TIME = 2.0**40
NO_REVISION = b""
MAX_STORED = 2 * MAX_REVISIONS  # with revisions that contradict others


def steerable_keys() -> tuple[str, ...]:
    """Return the keys that a revision may change."""
    return (*(f"{section}.{key}" for section, keys in STEERABLE.items() for key in keys), PAUSED_KEY)


@dataclass(frozen=True)
class Revision:
    """One revision; `previous` is empty for the first. `changes` is canonical JSON."""

    number: int
    previous: Digest
    from_round: int
    changes: str
    time: float

    def to_wire(self) -> wire.Revision:
        return wire.Revision(
            number=self.number,
            previous=self.previous,
            from_round=self.from_round,
            changes=self.changes,
            time=self.time,
        )

    @classmethod
    def from_wire(cls, body: wire.Revision) -> Self:
        """Check a revision.

        Raises:
            MalformedError: A value is out of bounds, or a key cannot be steered.
        """
        if not 1 <= body.number <= MAX_REVISIONS:
            raise MalformedError(f"revision {body.number} is out of range")
        if (body.number == 1) != (body.previous == NO_REVISION):
            raise MalformedError("the first revision, and no other, follows none")
        if body.previous:
            check_digest(body.previous)
        if body.from_round > MAX_ROUND or not 0 <= body.time <= MAX_TIME:
            raise MalformedError("a revision whose round or time is out of range")
        parse_changes(body.changes)
        return cls(body.number, body.previous, body.from_round, body.changes, body.time)

    @cached_property
    def values(self) -> Mapping[str, Value]:
        """Return the new value of each changed key."""
        return parse_changes(self.changes)


def encode_changes(values: Mapping[str, Value]) -> str:
    """Return changes in canonical form. Raises UsageError for a key or value that a revision cannot have."""
    text = json.dumps(dict(values), sort_keys=True, separators=(",", ":"))
    try:
        parse_changes(text)
    except MalformedError as error:
        raise UsageError(str(error)) from error
    return text


def parse_changes(text: str) -> Mapping[str, Value]:
    """Return the changes in a text. Raises MalformedError unless it is canonical and every value is allowed."""
    if len(text.encode()) > MAX_REVISION_BYTES:
        raise MalformedError(f"the changes of a revision have at most {MAX_REVISION_BYTES} bytes")
    try:
        values = json.loads(text)
        is_canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False) == text
    except (ValueError, RecursionError) as error:
        raise MalformedError("the changes of a revision are not JSON") from error
    if not (is_canonical and isinstance(values, dict) and values):
        raise MalformedError("the changes of a revision are not one JSON object in canonical form")
    for key, value in values.items():
        _check_change(key, value)
    try:
        revise(REFERENCE_MANIFEST, values)
    except ValidationError as error:
        raise MalformedError(describe_faults(error)) from error
    return values


def _check_change(key: str, value: object) -> None:
    section, _, name = key.partition(".")
    if key == PAUSED_KEY:
        if not isinstance(value, bool):
            raise MalformedError(f"{PAUSED_KEY} is true or false")
    elif name not in STEERABLE.get(section, ()):
        shown = key if key.isprintable() and len(key) <= 40 else "that key"
        raise MalformedError(f"a revision cannot change {shown}; it can change {', '.join(steerable_keys())}")
    elif value is None and key not in NULLABLE_KEYS:
        raise MalformedError(f"{key} needs a value")


def revise(manifest: Manifest, values: Mapping[str, Value]) -> Manifest:
    """Return the manifest with other values. Raises ValidationError if one is out of bounds."""
    tables = manifest.model_dump(mode="json")
    for key, value in values.items():
        section, _, name = key.partition(".")
        if key != PAUSED_KEY:
            tables[section][name] = value
    return Manifest.model_validate_json(json.dumps(tables))


def describe_changes(revision: Revision) -> str:
    """Return the number and changes of a revision for people, such as `3: target.rounds = 200`."""
    words = (_describe_change(key, value, revision.from_round) for key, value in revision.values.items())
    return f"{revision.number}: {', '.join(words)}"


def _describe_change(key: str, value: Value, from_round: int) -> str:
    if key == PAUSED_KEY:
        return "the run pauses" if value else "the run goes on"
    if is_stop(key, value, from_round):
        return f"the run stops after round {value}"
    return f"{key} = {json.dumps(value)}"


def is_stop(key: str, value: object, from_round: int) -> bool:
    """Return whether a change ends the run at once, as `murmur steer RUN stop` does."""
    return key == "target.rounds" and value == stop_target(from_round)


def stop_target(from_round: int) -> int:
    """Return the target, in rounds, of a run that stops from a round on."""
    return max(1, from_round)


def describe_revision(revision: Revision) -> str:
    """Return a revision on one line for people, such as `3: target.rounds = 200, from round 57`."""
    return f"{describe_changes(revision)}, from round {revision.from_round}"


@dataclass(frozen=True)
class RevisedManifest:
    """The manifest of a round, and whether the organiser has paused the run. Its run id is not that of the run."""

    manifest: Manifest
    is_paused: bool = False

    def is_target_reached(self, rounds: int, tokens: int) -> bool:
        """Return whether a run with this many rounds and tokens is over."""
        target = self.manifest.target
        return (target.rounds is not None and rounds >= target.rounds) or (
            target.tokens is not None and tokens >= target.tokens
        )


def manifest_of_round(base: Manifest, revisions: Iterable[Revision], round_number: int) -> RevisedManifest:
    """Return the manifest of a round: the base with the changes that hold by then, later numbers last."""
    values: dict[str, Value] = {}
    for revision in revisions:
        if revision.from_round <= round_number:
            values.update(revision.values)
    is_paused = bool(values.get(PAUSED_KEY, False))
    return RevisedManifest(revise(base, values) if values else base, is_paused)


# The checks of a value do not depend on the rest of the manifest, so any valid manifest serves.
REFERENCE_MANIFEST = Manifest.model_validate(
    {
        "run": {"name": "reference"},
        "model": {"width": 8, "layers": 1, "heads": 1, "hidden": 8, "context": 2},
        "data": {"source": "python-stdlib"},
        "train": {"batch_tokens": 2, "learning_rate": 1.0},
        "method": {"recipe": "diloco"},
    }
)


SignedRevision = SignedMessage[Revision]


def open_revision(signed: wire.Signed, run_id: RunId, organiser: PeerId) -> SignedRevision:
    """Return the checked revision in an envelope.

    Raises:
        ForgedError: It is not signed by the organiser of the run.
        MalformedError: It is invalid.
    """
    if signed.kind == REVISION_KIND and signed.peer != organiser:  # before the signature, which takes time to verify
        raise ForgedError("a revision that the organiser of the run has not signed")
    body = open_signed(signed, run_id, REVISION_KIND, wire.Revision, MAX_REVISION_BYTES)
    return SignedMessage.of(signed, Revision.from_wire(body))


def read_revision(signed: wire.Signed) -> SignedRevision:
    """Return the revision in an envelope that this program verified before. Raises MalformedError."""
    body = read_unverified(signed, REVISION_KIND, wire.Revision, MAX_REVISION_BYTES)
    return SignedMessage.of(signed, Revision.from_wire(body))


class RevisionLog:
    """The revisions of one run that this peer knows."""

    def __init__(self) -> None:
        self._revisions: dict[Digest, SignedRevision] = {}
        self._successors: dict[Digest, list[SignedRevision]] = {}

    def __contains__(self, digest: Digest) -> bool:
        return digest == NO_REVISION or digest in self._revisions

    @property
    def revisions(self) -> tuple[SignedRevision, ...]:
        """Return all revisions, each after the one that it continues."""
        return tuple(self._revisions.values())

    def add(self, revision: SignedRevision) -> Literal["known", "new", "conflict"]:
        """Add a revision whose signature is verified; "conflict" means that it contradicts one that is known.

        Raises:
            StaleError: It continues a revision that is not known.
            LimitError: The log is full.
        """
        if revision.digest in self._revisions:
            return "known"
        previous = self._revisions.get(revision.body.previous)
        expected = previous.body.number + 1 if previous else 1
        if revision.body.previous not in self or revision.body.number != expected:
            raise StaleError(f"revision {revision.body.number} continues one that is not known here")
        if len(self._revisions) >= MAX_STORED:
            raise LimitError(f"more than {MAX_STORED} revisions of one run")
        self._revisions[revision.digest] = revision
        successors = self._successors.setdefault(revision.body.previous, [])
        successors.append(revision)
        return "conflict" if len(successors) > 1 else "new"

    def list_to(self, digest: Digest) -> tuple[SignedRevision, ...] | None:
        """Return the revisions up to one, oldest first; None if it is not known."""
        entries: list[SignedRevision] = []
        while digest != NO_REVISION:
            if digest not in self._revisions:
                return None
            entries.append(self._revisions[digest])
            digest = entries[-1].body.previous
        return tuple(reversed(entries))

    def list_after(self, adopted: Digest) -> tuple[SignedRevision, ...]:
        """Return the revisions with which the list goes on after an adopted one: of several, the last written."""
        entries: list[SignedRevision] = []
        while successors := self._successors.get(adopted):
            newest = max(successors, key=lambda entry: (entry.body.time, entry.digest))
            entries.append(newest)
            adopted = newest.digest
        return tuple(entries)

    def newest(self, adopted: Digest = NO_REVISION) -> Digest:
        """Return the digest of the last revision of the list that goes on after an adopted one."""
        after = self.list_after(adopted)
        return after[-1].digest if after else adopted
