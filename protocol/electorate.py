"""The electorate: the keys that may vote in the next round of a chain. PURE.

It follows from the manifest and the commits of the chain alone, so all peers on one head agree on it, and certificates
name it by its digest. The table [admission] of the manifest chooses one of three rules:

- "list": the keys of the manifest vote.
- "tickets": a key that holds a ticket of the organiser gains a vote with its first included contribution.
- "open": the founders of the manifest vote, or, without any, the contributors of the first commit. Later a key earns a
  vote with `INCLUSIONS_FOR_VOTE` included contributions in the last `WINDOW_ROUNDS` commits.

In the last two a key loses its vote after `ABSENCES_TO_LOSE` commits in a row without a contribution of its own. In
open runs keys cost nothing: so the keys that gain a vote in a window are at most a third of those that had one before,
or a single key. Revoked keys have no vote, from the commit on that adopts their revision.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from protocol.consensus.messages.contributions import MAX_CONTRIBUTIONS, Commit
from protocol.consensus.messages.signed import Digest
from protocol.errors import MalformedError
from protocol.identity import PeerId
from protocol.manifest.sections import MAX_ROUNDS, AdmissionSection

WINDOW_ROUNDS = 32
INCLUSIONS_FOR_VOTE = 8
ABSENCES_TO_LOSE = 8
ENTRY_SHARE = 3  # one key gains a vote in a window for each three voters
MAX_CANDIDATES = 4096  # keys without a vote whose attendance counts
MAX_ELECTORATE_BYTES = 1 << 20
MAX_KEY_CHARACTERS = 64
REVOKED_KEY = "admission.revoked"  # the key of a revision
_WINDOW = (1 << WINDOW_ROUNDS) - 1
_ABSENT = (1 << ABSENCES_TO_LOSE) - 1
_REGULAR = 0b111
_PRESENT = 1
OPEN = AdmissionSection()
Attendance = Mapping[PeerId, int]  # a bit for each of the last commits, the newest lowest: whether it includes the key


@dataclass(frozen=True)
class Electorate:
    """The voters of the round after the first `round` commits of a chain; immutable.

    `rule`: the table [admission] of the manifest. `voters` is empty if nobody has a vote yet: then every admitted live
    member votes. `attendance`: the inclusions of each key in the last commits. `entries`: the rounds of the window in
    which keys gained a vote, with one entry for each key.
    """

    rule: AdmissionSection
    round: int
    voters: frozenset[PeerId]
    attendance: Attendance = field(default_factory=dict, hash=False)
    entries: tuple[int, ...] = ()
    revoked: frozenset[PeerId] = frozenset()

    @classmethod
    def at_genesis(cls, rule: AdmissionSection = OPEN) -> Self:
        """Return the electorate of the first round of a run."""
        revoked = frozenset(rule.revoked)
        voters = frozenset(rule.keys if rule.mode == "list" else rule.founders) - revoked
        attendance = {} if rule.mode == "list" else dict.fromkeys(voters, _PRESENT)
        return cls(rule, 0, voters, attendance, (), revoked)

    def after(self, commit: Commit) -> "Electorate":
        """Return the electorate after a commit that continues the chain."""
        current = replace(self, round=commit.round + 1, revoked=self._revoked_after(commit))
        if self.rule.mode == "list":
            return replace(current, voters=frozenset(self.rule.keys) - current.revoked)
        return current._with_attendance(commit)

    def _revoked_after(self, commit: Commit) -> frozenset[PeerId]:
        lists = [revision.body.values[REVOKED_KEY] for revision in commit.adoption.added
                 if REVOKED_KEY in revision.body.values]  # fmt: skip
        newest = lists[-1] if lists else None
        return frozenset(newest) if isinstance(newest, list | tuple) else self.revoked

    def _with_attendance(self, commit: Commit) -> "Electorate":
        """Return this electorate with the contributions of a commit counted: absent voters leave, new ones enter."""
        senders = frozenset(commit.by_sender) - self.revoked
        seen = {peer: (bits << 1) & _WINDOW for peer, bits in self.attendance.items()} | dict.fromkeys(
            senders - self.attendance.keys(), 0
        )
        seen = {peer: bits | (peer in senders) for peer, bits in seen.items() if peer not in self.revoked}
        staying = frozenset(peer for peer in self.voters & seen.keys() if seen[peer] & _ABSENT)
        lost = self.voters - staying
        entries = tuple(number for number in self.entries if number > commit.round - WINDOW_ROUNDS)
        entering = self._entering(commit, {peer: seen[peer] for peer in senders - staying}, staying, len(entries))
        voters = staying | entering
        attendance = {peer: bits for peer, bits in seen.items() if bits and (peer in voters or peer not in lost)}
        is_founding = not staying
        return replace(
            self,
            voters=voters,
            attendance=_bounded(attendance, voters),
            entries=entries if is_founding else entries + (commit.round,) * len(entering),
        )

    def _entering(
        self, commit: Commit, candidates: Attendance, staying: frozenset[PeerId], recent: int
    ) -> frozenset[PeerId]:
        """Return the contributors of a commit that gain a vote with it."""
        if self.rule.mode == "tickets":
            return frozenset(peer for peer in candidates if _has_ticket(commit, peer))
        if not staying:  # nobody is left who could let them in
            return frozenset(candidates)
        earned = {peer: bits for peer, bits in candidates.items() if bits.bit_count() >= INCLUSIONS_FOR_VOTE}
        established = max(0, len(staying) - recent)
        free = max(1, established // ENTRY_SHARE) - recent
        # Ties are broken by the content of the commit, which nobody knew when he chose his key.
        ranked = sorted(earned, key=lambda peer: (-earned[peer].bit_count(), _rank(commit.content_digest, peer)))
        return frozenset(ranked[: max(0, free)])

    def counted(self, members: Set[PeerId], known: Set[PeerId]) -> frozenset[PeerId]:
        """Return those of `known` whose votes count in a round with these members.

        They are the voters. If no voter is a member any more, the keys that contributed lately go on without them, and
        if there is none of these either, all do.
        """
        groups: tuple[Set[PeerId], ...] = (self.voters, self.attendance.keys())
        return frozenset(known & next((group for group in groups if not group.isdisjoint(members)), known))

    def has_vote(self, peer: PeerId) -> bool | None:
        """Return whether a key has a vote, None while nobody has one yet."""
        return peer in self.voters if self.voters else None

    @cached_property
    def standing(self) -> frozenset[PeerId]:
        """Return the voters, and the keys without a vote that contributed to one of the last commits."""
        return self.voters | {peer for peer, bits in self.attendance.items() if bits & _ABSENT}

    def is_regular(self, peer: PeerId) -> bool:
        """Return whether the last commits all include a key: peers wait for its next contribution."""
        return self.attendance.get(peer, 0) & _REGULAR == _REGULAR

    def tolerated_liars(self, count: int) -> int:
        """Return how many of `count` voters may lie."""
        return 0 if self.rule.trusted else max(0, count - 1) // 3

    @property
    def may_lie(self) -> bool:
        """Return whether a round tolerates liars among all voters: then it takes two phases (`locks`)."""
        return self.tolerated_liars(len(self.voters)) > 0

    def quorum_size(self, count: int) -> int:
        """Return how many of `count` voters decide.

        Any two such sets share more than a third of the voters, so they share an honest one while fewer than a third
        are liars; in a list whose members trust one another they share one.
        """
        return (count + self.tolerated_liars(count)) // 2 + 1

    def is_certified_by(self, peers: Iterable[PeerId]) -> bool:
        """Return whether these peers are a quorum of all voters; without voters nobody can be sure."""
        return bool(self.voters) and len(self.voters.intersection(peers)) >= self.quorum_size(len(self.voters))

    @cached_property
    def digest(self) -> Digest:
        """Return the SHA-256 of the canonical bytes."""
        return hashlib.sha256(self.to_bytes()).digest()

    def to_bytes(self) -> bytes:
        """Return the canonical bytes; the rule is left out, because it follows from the run id."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":")).encode()

    def to_json(self) -> dict[str, Any]:
        """Return the electorate as it is stored in a checkpoint."""
        return {
            "round": self.round,
            "voters": sorted(self.voters),
            "attendance": dict(self.attendance),
            "entries": list(self.entries),
            "revoked": sorted(self.revoked),
        }

    @classmethod
    def from_bytes(cls, raw: bytes, rule: AdmissionSection) -> Self:
        """Read an electorate. Raises MalformedError unless the bytes are canonical and within their bounds."""
        if len(raw) > MAX_ELECTORATE_BYTES:
            raise MalformedError(f"an electorate of {len(raw)} bytes; at most {MAX_ELECTORATE_BYTES} are allowed")
        try:
            values = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise MalformedError("an electorate that is not JSON") from error
        electorate = cls.from_json(values, rule)
        if electorate.to_bytes() != raw:
            raise MalformedError("an electorate that is not in canonical form")
        return electorate

    @classmethod
    def from_json(cls, values: object, rule: AdmissionSection) -> Self:
        """Read the values of `to_json`. Raises MalformedError."""
        if not isinstance(values, dict) or values.keys() != {"round", "voters", "attendance", "entries", "revoked"}:
            raise MalformedError("an electorate with other values")
        voters, revoked = _keys(values["voters"]), _keys(values["revoked"])
        attendance, entries = values["attendance"], values["entries"]
        if not isinstance(attendance, dict) or len(attendance) > MAX_CANDIDATES + MAX_CONTRIBUTIONS * WINDOW_ROUNDS:
            raise MalformedError("an electorate whose attendance is malformed")
        _keys(list(attendance))
        if not all(_is_count(bits, _WINDOW) and bits for bits in attendance.values()):
            raise MalformedError("an electorate whose attendance is out of range")
        if not isinstance(entries, list) or not all(_is_count(number, MAX_ROUNDS) for number in entries):
            raise MalformedError("an electorate whose entries are malformed")
        if not _is_count(values["round"], MAX_ROUNDS):
            raise MalformedError("an electorate of a round that is out of range")
        return cls(rule, values["round"], voters, attendance, tuple(entries), revoked)


def _keys(values: object) -> frozenset[PeerId]:
    if not isinstance(values, list) or not all(
        isinstance(value, str) and 0 < len(value) <= MAX_KEY_CHARACTERS for value in values
    ):
        raise MalformedError("an electorate whose keys are malformed")
    return frozenset(values)


def _is_count(value: object, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limit


def _bounded(attendance: Attendance, voters: frozenset[PeerId]) -> Attendance:
    """Return the attendance of all voters, and of those other keys that attended most."""
    others = [peer for peer in attendance if peer not in voters]
    if len(others) <= MAX_CANDIDATES:
        return attendance
    others.sort(key=lambda peer: (-attendance[peer].bit_count(), -attendance[peer], peer))
    kept = voters | frozenset(others[:MAX_CANDIDATES])
    return {peer: bits for peer, bits in attendance.items() if peer in kept}


def _has_ticket(commit: Commit, peer: PeerId) -> bool:
    ticket = commit.by_sender[peer].body.ticket
    return ticket is not None and ticket.body.key == peer


def _rank(seed: Digest, peer: PeerId) -> bytes:
    return hashlib.sha256(seed + peer.encode()).digest()


NOBODY = Electorate.at_genesis()
