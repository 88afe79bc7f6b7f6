"""Revisions: the changes of a run's manifest that its organiser signs while the run goes on.

A revision names its number, the digest of the revision before it, the round from which it holds, and new values for
keys of the manifest. `run.organiser_key` is the only key whose revisions count. Revisions form a list, and a list has
one meaning: the manifest of a round is the base manifest with the changes of all revisions that hold by then, in the
order of their numbers.

A change is one JSON object, for example {"target.rounds":200,"train.learning_rate":0.001}. `STEERABLE` lists its keys.
All others stay as they are: shapes, method, data, seed and the organiser's key decide what the weights mean, and the
intervals of gossip hold for every node at any moment, also for one that does not know the newest revision.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Self

from pydantic import ValidationError

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import check_digest
from protocol.errors import MalformedError, UsageError
from protocol.fault_words import describe_faults
from protocol.manifest.run import Manifest
from protocol.signing import MAX_ROUND

Digest = bytes
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
    changes = ", ".join(f"{key} = {json.dumps(value)}" for key, value in revision.values.items())
    return f"{revision.number}: {changes}"


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
