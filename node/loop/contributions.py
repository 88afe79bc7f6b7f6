"""The trainer's message on its way: offered to one round after the other until one takes it.

A delta that misses its round is still a delta: it joins the next one that exchanges the same values in the same code,
up to MAX_AGE rounds late. After that it is given back to the trainer, whose residual takes it in. Exactly one of the
two happens, and is remembered until the trainer's next message, so a trainer (or a whole node) that died in between
hears of it afterwards. Where it cannot be known whether a round has taken it, neither happens: it is lost.

A network that was split for longer than votes are remembered has two chains, and on each another fate. Whoever goes
over to the other chain judges its last messages anew (`Offers.jump`): what only the chain that it leaves has taken is
given back, and what was given back although the new one has it is taken out again of what is to be sent. That is a sum
and a difference, since what is to be sent is all that was trained less all that was applied. PURE.

The last message of our trainer that others may have, on disk before anybody hears of it.

A checkpoint may be older than that message. Without this a start from it would send the same work in another one.
"""

import json
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from node.ipc.channel import ContributionHeader, ContributionOutcome
from node.ipc.shared_memory import SharedMemory
from node.run_dir import write_atomically
from optim.round_plan import RoundPlanner
from protocol.blobs.blob import Blob
from protocol.blobs.store import BlobStore
from protocol.consensus.chain import ChainHead
from protocol.consensus.messages import Commit, Contribution, ContributionLimits
from protocol.errors import StorageError
from protocol.identity import PeerId

MAX_AGE_ROUNDS = 3  # rounds
MAX_RESTORABLE = 3  # decided ones that can be given back once more: their blobs stay on disk
MAX_SETTLED = 16  # decided ones that another chain may judge otherwise
MAX_HISTORY_ROUNDS = 48  # rounds; no chain is asked for more

SentSinceSnapshot = Literal["none", "one", "many"]
Parts = tuple[Blob, ...]


@dataclass(frozen=True)
class StoredContribution:
    header: ContributionHeader
    parts: Parts

    def to_contribution(self, head: ChainHead, limits: ContributionLimits) -> Contribution:
        """To the round that follows `head`."""
        return Contribution(
            round=head.round,
            base=head.digest,
            codec=limits.codec,
            shapes=limits.shapes,
            tokens=self.header.tokens,
            steps=self.header.steps,
            loss=self.header.loss,
            parts=self.parts,
            age=max(0, head.round - self.header.round),
        )

    def to_json(self) -> dict[str, Any]:
        parts = [{"digest": blob.digest.hex(), "size": blob.size} for blob in self.parts]
        return {"message": self.header.model_dump(mode="json"), "parts": parts}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "StoredContribution":
        parts = tuple(Blob(bytes.fromhex(part["digest"]), int(part["size"])) for part in values["parts"])
        return cls(ContributionHeader.model_validate(values["message"]), parts)


@dataclass(frozen=True)
class SettledContribution:
    """A message that is decided. `since`: the first round that it may have been offered to. `was`: the fate that its
    trainer was told before, where another chain has judged otherwise. `carrier`: the serial of the message that went on
    its way with what was given back of this one; None: there was none yet."""

    contribution: StoredContribution
    submitted_since: int
    outcome: ContributionOutcome
    previous_outcome: ContributionOutcome | None = None
    resent_in: int | None = None

    def mark_resent(self, contribution: StoredContribution) -> "SettledContribution":
        """A new message carries what was given back before it."""
        fresh = self.outcome == "excluded" and self.resent_in is None
        return replace(self, resent_in=contribution.header.serial) if fresh else self

    def to_json(self) -> dict[str, Any]:
        values = {
            "since": self.submitted_since,
            "fate": self.outcome,
            "was": self.previous_outcome,
            "carrier": self.resent_in,
        }
        return {**self.contribution.to_json(), **values}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "SettledContribution":
        offer = StoredContribution.from_json(values)
        return cls(offer, int(values["since"]), values["fate"], values["was"], values["carrier"])


class LastSent(NamedTuple):
    """The last message that others may have, and those before it."""

    contribution: StoredContribution
    settled: tuple[SettledContribution, ...] = ()


class ForkOutcome(NamedTuple):
    """Of another chain: on the message that is on its way, and on those whose fate is another now."""

    outcome: ContributionOutcome
    revised: tuple[SettledContribution, ...] = ()

    @property
    def retracts_restored(self) -> bool:
        """Whether something that was given back must be taken out again."""
        return any(entry.previous_outcome == "excluded" for entry in self.revised)


class ContributionTracker:
    """At most one message is undecided. `past`: the last that were decided, oldest first."""

    def __init__(
        self,
        program: RoundPlanner,
        last_outcome: tuple[int, ContributionOutcome] | None = None,
        settled: Sequence[SettledContribution] = (),
    ) -> None:
        self._program = program
        self.pending: StoredContribution | None = None
        self.submitted_since = 0  # the first round that it may have been offered to
        self.last_outcome = last_outcome  # round and fate of the last message that was decided
        self.settled = list(settled)

    @property
    def retained_parts(self) -> list[Blob]:
        """Of all messages that may be asked for, or given back."""
        kept = self.settled[-MAX_RESTORABLE:]
        offers = [past.contribution for past in kept] + ([self.pending] if self.pending else [])
        return [part for offer in offers for part in offer.parts]

    def history_needed_since(self, round_number: int) -> int:
        """The first round of another chain that tells what became of our messages; `number`: that we stand before."""
        offered = [*(past.submitted_since for past in self.settled), *([self.submitted_since] if self.pending else [])]
        return min([round_number, *(since for since in offered if since >= round_number - MAX_HISTORY_ROUNDS)])

    def is_known(self, header: ContributionHeader) -> bool:
        """Whether what a trainer that came back repeats is on its way or decided."""
        return (
            self.pending is not None
            and self.pending.header.round == header.round
            or (self.outcome_of(header.round) != "none")
        )

    def submit(self, contribution: StoredContribution, round_number: int | None = None) -> None:
        """A new message: its trainer has heard of the fate of the one before it. `number`: where we stand, if it is not
        the round that the message was made for."""
        # Rounds start anew from a lower number on another chain: an old fate must not pass for that of this message.
        self.pending = contribution
        self.last_outcome = None
        self.settled = [entry.mark_resent(contribution) for entry in self.settled[-MAX_SETTLED:]]
        self.submitted_since = contribution.header.round if round_number is None else round_number

    def restore(
        self, outstanding: StoredContribution | None, made_count: int, last_sent: LastSent | None, round_number: int
    ) -> SentSinceSnapshot:
        """After a start from disk, before round `number`: put the message in its place that may be on its way.

        The trainer goes on from a snapshot that knows of `made` messages, the last of them `outstanding` or decided.
        Returns how many messages were made after the snapshot: what it
        still had to say is in these, and must not be said again.
        """
        if last_sent is None or last_sent.contribution.header.serial <= made_count:
            if outstanding is not None and self.outcome_of(outstanding.header.round) == "none":
                self.submit(outstanding, round_number)
            return "none"
        message, self.settled = last_sent.contribution.header, list(last_sent.settled)
        self.submit(last_sent.contribution, round_number)
        if not self._may_join(message.round, round_number):
            self._settle("lost")  # a round that we have forgotten may have it
        return "one" if message.serial == made_count + 1 else "many"

    def outcome_of(self, made_for_round: int | None) -> ContributionOutcome:
        """Of the message that a trainer calls outstanding."""
        if self.last_outcome is not None and self.last_outcome[0] == made_for_round:
            return self.last_outcome[1]
        return "none"

    def on_commit(self, peer_id: PeerId, commit: Commit) -> ContributionOutcome:
        """What a commit means for our message."""
        if self.pending is None:
            return "none"
        if self._is_included(peer_id, commit):
            return self._settle("included")
        return self.on_round(commit.round + 1)

    def on_commits(self, peer_id: PeerId, commits: Sequence[Commit], round_number: int) -> ContributionOutcome:
        """What these commits, in order, mean for our message, and that we stand before `number` now."""
        fates = [*(self.on_commit(peer_id, commit) for commit in commits), self.on_round(round_number)]
        return next((fate for fate in fates if fate != "none"), "none")

    def on_fork(
        self, peer_id: PeerId, commits: Sequence[Commit], round_number: int, old_head: ChainHead
    ) -> ForkOutcome:
        """We stand on another chain than that of `left`, or further on that, before `number`. `commits`: those that we
        know of it, one after the other. Another chain may have taken our messages in rounds that ended otherwise on
        ours."""
        taken = {entry.body.parts for commit in commits for entry in commit.contributions if entry.sender == peer_id}
        known_since = commits[0].round if commits and commits[-1].round == round_number - 1 else round_number
        is_ours = any((commit.round, commit.base) == (old_head.round, old_head.digest) for commit in commits)
        fate = self._pending_outcome_on_fork(
            taken, 0 if is_ours and known_since < round_number else known_since, round_number
        )
        is_pending = fate in ("none", "excluded")
        verdict = ForkOutcome(fate, () if is_ours else self._revise_settled(taken, known_since, is_pending))
        if verdict.retracts_restored and self.pending is not None and fate == "none":
            verdict = verdict._replace(outcome="excluded")  # it may carry that, too
        if verdict.outcome != "none":
            self._settle(verdict.outcome)
        return verdict

    def _pending_outcome_on_fork(
        self, included: Set[Parts], known_since: int, round_number: int
    ) -> ContributionOutcome:
        """The message that is on its way."""
        if self.pending is None:
            return "none"
        if self.pending.parts in included:
            return "included"
        if self.submitted_since < known_since:
            return "lost"
        self.submitted_since = min(self.submitted_since, round_number)
        return "none" if self._may_join(self.pending.header.round, round_number) else "excluded"

    def _revise_settled(
        self, included: Set[Parts], known_since: int, is_unsent: bool
    ) -> tuple[SettledContribution, ...]:
        """The messages that were decided, from the newest on. `is_pending`: whether what the message that is on its way
        carries is still to be sent on that chain."""
        pending = {self.pending.header.serial: is_unsent} if self.pending else {}
        revised: list[SettledContribution] = []
        for place, entry in reversed(list(enumerate(self.settled))):
            fate: ContributionOutcome = "included" if entry.contribution.parts in included else "excluded"
            was_pending = entry.outcome == "excluded" and (
                entry.resent_in is None or pending.get(entry.resent_in, False)
            )
            is_kept = entry.outcome == "excluded" or place >= len(self.settled) - MAX_RESTORABLE
            if fate == "excluded" and (entry.submitted_since < known_since or not is_kept):
                fate = "lost"
            is_news = entry.outcome == "included" != fate or (was_pending and fate != "excluded")
            if is_news:
                self.settled[place] = replace(entry, outcome=fate, previous_outcome=entry.outcome, resent_in=None)
                revised.append(self.settled[place])
            pending[entry.contribution.header.serial] = fate == "excluded" and (was_pending or is_news)
        return tuple(revised)

    def _is_included(self, peer_id: PeerId, commit: Commit) -> bool:
        entries = (contribution for contribution in commit.contributions if contribution.sender == peer_id)
        return self.pending is not None and any(entry.body.parts == self.pending.parts for entry in entries)

    def reject(self, contribution: StoredContribution, round_number: int) -> None:
        """A message that carries what is about to be taken out: nobody is offered it, and its trainer gets it back."""
        self.pending = contribution
        self.submitted_since = round_number
        self._settle("excluded")

    def on_round(self, round_number: int) -> ContributionOutcome:
        """We stand before that round: a message that it cannot take is given back."""
        if self.pending is None:
            return "none"
        self.submitted_since = min(self.submitted_since, round_number)
        return "none" if self._may_join(self.pending.header.round, round_number) else self._settle("excluded")

    def _may_join(self, made_for_round: int, round_number: int) -> bool:
        """Rounds may also have gone back: on another chain, or since the last save."""
        plan = self._program.plan
        return abs(round_number - made_for_round) <= MAX_AGE_ROUNDS and plan(made_for_round).is_compatible_with(
            plan(round_number)
        )

    def _settle(self, outcome: ContributionOutcome) -> ContributionOutcome:
        assert self.pending is not None
        self.settled.append(SettledContribution(self.pending, self.submitted_since, outcome))
        self.last_outcome = self.pending.header.round, outcome
        self.pending = None
        return outcome

    def to_json(self) -> dict[str, Any]:
        return {"decided": self.last_outcome, "past": [entry.to_json() for entry in self.settled]}

    @classmethod
    def from_json(cls, program: RoundPlanner, values: dict[str, Any]) -> "ContributionTracker":
        decided = values["decided"]
        past = [SettledContribution.from_json(entry) for entry in values["past"]]
        return cls(program, None if decided is None else (int(decided[0]), decided[1]), past)


class ContributionFile:
    """Its parts lie in the blob store."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def save(self, last_sent: LastSent) -> None:
        """On disk once this returns. Raises StorageError."""
        values = {**last_sent.contribution.to_json(), "past": [entry.to_json() for entry in last_sent.settled]}
        write_atomically(self._path, json.dumps(values).encode())

    def load(self) -> LastSent | None:
        """None: nothing was ever sent. Raises StorageError for what `save` did not write."""
        try:
            return _last_sent_from_json(json.loads(self._path.read_bytes()))
        except FileNotFoundError:
            return None
        except OSError as error:
            text = f"cannot read {self._path}: {error.strerror}; mend its folder, or choose another --dir"
            raise StorageError(text) from error
        except (ValueError, TypeError, KeyError) as error:
            raise StorageError(f"{self._path} is damaged: remove it together with the folder checkpoints") from error

    def delete(self) -> None:
        """A trainer that knows of nothing begins to count its messages anew. Raises StorageError."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"cannot remove {self._path}: {error.strerror}; mend its folder") from error


def _last_sent_from_json(values: dict[str, Any]) -> LastSent:
    return LastSent(
        StoredContribution.from_json(values), tuple(SettledContribution.from_json(entry) for entry in values["past"])
    )


def store_parts(store: BlobStore, shared_memory: SharedMemory, header: ContributionHeader) -> tuple[Blob, ...]:
    """Put the parts of the contribution that the trainer has just written into the store."""
    return tuple(store.put(part) for part in shared_memory.contribution_parts(header.sizes))
