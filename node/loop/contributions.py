"""Track the trainer's contribution until a round includes it, or it returns to the trainer. PURE.

A contribution that misses its round is resubmitted to the next round that exchanges the same values with the same
codec, up to MAX_AGE_ROUNDS late. After that it is excluded: the trainer adds it back to its residual. Exactly one of
the two happens, and the outcome is kept until the trainer's next contribution, so a trainer (or a whole node) that died
in between learns it later. If it is unknown whether a round included the contribution, neither happens: it is lost.

A network that was partitioned for longer than votes are remembered has two chains, and a contribution may have another
outcome on each. A peer that switches chains revises its last outcomes (`ContributionTracker.on_fork`): what only the
old chain included is returned to the trainer, and what was returned although the new chain includes it is subtracted
from the work to be sent. Both are plain arithmetic, because the work to be sent is all trained minus all applied work.

A peer may also come back to a chain before a commit that has its work: then the outcome is revised when that commit is
applied (`ContributionTracker.on_decided`).
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from node.trainer.ipc.channel import ContributionHeader, ContributionOutcome
from optim.round_plan import RoundPlanner
from protocol.blobs.blob import Blob
from protocol.consensus.chain import ChainHead
from protocol.consensus.messages.contributions import Commit, Contribution, ContributionLimits
from protocol.identity import PeerId
from protocol.rollout_credits import choose_credits

MAX_AGE_ROUNDS = 3
MAX_RESTORABLE = 3  # settled contributions that can still be returned: their blobs stay on disk
MAX_SETTLED = 16  # settled contributions whose outcome another chain may revise
MAX_HISTORY_ROUNDS = 48  # no chain is asked for more rounds

SentSinceSnapshot = Literal["none", "one", "many"]
Parts = tuple[Blob, ...]


@dataclass(frozen=True)
class StoredContribution:
    """A contribution whose parts are in the blob store; `work` names the record of how it was made."""

    header: ContributionHeader
    parts: Parts
    work: Blob | None = None

    def to_contribution(self, head: ChainHead, limits: ContributionLimits) -> Contribution:
        """Return the message that submits it to the round after `head`."""
        tokens = max(1, min(self.header.tokens, limits.max_tokens))  # an exact step may have nothing of this peer
        return Contribution(
            round=head.round,
            base=head.digest,
            codec=limits.codec,
            shapes=limits.shapes,
            tokens=tokens,
            steps=self.header.steps,
            loss=self.header.loss,
            parts=self.parts,
            age=max(0, head.round - self.header.round),
            work=self.work,
            ledger=bytes.fromhex(self.header.ledger),
            credits=choose_credits(self.header.credits, limits.credited_groups or 0, tokens),
        )

    def to_json(self) -> dict[str, Any]:
        work = None if self.work is None else _blob_to_json(self.work)
        parts = [_blob_to_json(blob) for blob in self.parts]
        return {"message": self.header.model_dump(mode="json"), "parts": parts, "work": work}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "StoredContribution":
        parts = tuple(_blob_from_json(part) for part in values["parts"])
        work = None if values["work"] is None else _blob_from_json(values["work"])
        return cls(ContributionHeader.model_validate(values["message"]), parts, work)


def _blob_to_json(blob: Blob) -> dict[str, Any]:
    return {"digest": blob.digest.hex(), "size": blob.size}


def _blob_from_json(values: dict[str, Any]) -> Blob:
    return Blob(bytes.fromhex(values["digest"]), int(values["size"]))


@dataclass(frozen=True)
class SettledContribution:
    """A contribution with an outcome.

    Args:
        submitted_since: the first round that it may have been submitted to.
        previous_outcome: the outcome reported to the trainer before, if another chain revised it.
        resent_in: the serial of the contribution that carries its returned work; None if none does yet.
    """

    contribution: StoredContribution
    submitted_since: int
    outcome: ContributionOutcome
    previous_outcome: ContributionOutcome | None = None
    resent_in: int | None = None

    def mark_resent(self, contribution: StoredContribution) -> "SettledContribution":
        """Return this entry after a new contribution, which carries the work returned before it."""
        is_carried = self.outcome == "excluded" and self.resent_in is None
        return replace(self, resent_in=contribution.header.serial) if is_carried else self

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
        contribution = StoredContribution.from_json(values)
        return cls(contribution, int(values["since"]), values["fate"], values["was"], values["carrier"])


class LastSent(NamedTuple):
    """The last contribution that other peers may have, and the settled ones before it."""

    contribution: StoredContribution
    settled: tuple[SettledContribution, ...] = ()


class ForkOutcome(NamedTuple):
    """The outcome of the pending contribution on a chain, and the revised outcomes of earlier ones."""

    outcome: ContributionOutcome
    revised: tuple[SettledContribution, ...] = ()

    @property
    def retracts_restored(self) -> bool:
        """Return whether returned work must be subtracted again."""
        return any(entry.previous_outcome == "excluded" for entry in self.revised)


class ContributionTracker:
    """The contributions of one replica: at most one pending, and the last settled ones, oldest first."""

    def __init__(
        self,
        planner: RoundPlanner,
        last_outcome: tuple[int, ContributionOutcome] | None = None,
        settled: Sequence[SettledContribution] = (),
    ) -> None:
        self._planner = planner
        self.pending: StoredContribution | None = None
        self.submitted_since = 0  # the first round that the pending one may have been submitted to
        self.last_outcome = last_outcome  # round and outcome of the last settled one
        self.settled = list(settled)

    @property
    def retained_parts(self) -> list[Blob]:
        """Return the parts of all contributions that a peer may request or that may still be returned."""
        contributions = [entry.contribution for entry in self.settled[-MAX_RESTORABLE:]]
        contributions += [self.pending] if self.pending else []
        return [part for contribution in contributions for part in contribution.parts]

    def history_needed_since(self, round_number: int) -> int:
        """Return the first round of another chain that may include one of our contributions.

        `round_number` is our next round.
        """
        submitted = [entry.submitted_since for entry in self.settled]
        submitted += [self.submitted_since] if self.pending else []
        return min([round_number, *(since for since in submitted if since >= round_number - MAX_HISTORY_ROUNDS)])

    def lacks(self, peer_id: PeerId, commits: Sequence[Commit]) -> bool:
        """Return whether commits include a contribution of ours that is newer than all that we remember.

        The last one is on disk before anybody sees it, so our files are then older than our signatures.
        """
        known = [entry.contribution for entry in self.settled] + ([self.pending] if self.pending else [])
        newest = max((contribution.header.round for contribution in known), default=-1)
        ours = (entry.body for commit in commits for entry in commit.contributions if entry.sender == peer_id)
        return any(body.round - body.age > newest for body in ours)

    def is_known(self, header: ContributionHeader) -> bool:
        """Return whether a contribution that a restarted trainer repeats is pending or settled."""
        return (
            self.pending is not None
            and self.pending.header.round == header.round
            or (self.outcome_of(header.round) != "none")
        )

    def submit(self, contribution: StoredContribution, round_number: int | None = None) -> None:
        """Make a new contribution pending; the trainer knows the outcome of the one before it.

        `round_number` is our next round, if it is not the round that the contribution was made for.
        """
        # Round numbers repeat on another chain: an old outcome must not be taken for that of this contribution.
        self.pending = contribution
        self.last_outcome = None
        self.settled = [entry.mark_resent(contribution) for entry in self.settled[-MAX_SETTLED:]]
        self.submitted_since = contribution.header.round if round_number is None else round_number

    def restore(
        self, outstanding: StoredContribution | None, made_count: int, last_sent: LastSent | None, round_number: int
    ) -> SentSinceSnapshot:
        """Restore the pending contribution after a start from disk, before round `round_number`.

        The trainer resumes from a snapshot after `made_count` contributions, the last of them `outstanding` or settled.

        Returns:
            How many contributions were made after the snapshot. They carry the unsent work of the snapshot, which must
            not be sent again.
        """
        if last_sent is None or last_sent.contribution.header.serial <= made_count:
            if outstanding is not None and self.outcome_of(outstanding.header.round) == "none":
                self.submit(outstanding, round_number)
            return "none"
        header, self.settled = last_sent.contribution.header, list(last_sent.settled)
        self.submit(last_sent.contribution, round_number)
        if not self._may_join(header.round, round_number):
            self._settle("lost")  # a round that we have forgotten may include it
        return "one" if header.serial == made_count + 1 else "many"

    def outcome_of(self, made_for_round: int | None) -> ContributionOutcome:
        """Return the outcome of the contribution that a trainer reports as outstanding."""
        if self.last_outcome is not None and self.last_outcome[0] == made_for_round:
            return self.last_outcome[1]
        return "none"

    def on_commit(self, peer_id: PeerId, commit: Commit) -> ContributionOutcome:
        """Return the outcome that a commit brings for the pending contribution."""
        if self.pending is None:
            return "none"
        if self._is_included(peer_id, commit):
            return self._settle("included")
        return self.on_round(commit.round + 1)

    def on_commits(self, peer_id: PeerId, commits: Sequence[Commit], round_number: int) -> ContributionOutcome:
        """Return the outcome after these commits, in order, before round `round_number`."""
        outcomes = [*(self.on_commit(peer_id, commit) for commit in commits), self.on_round(round_number)]
        return next((outcome for outcome in outcomes if outcome != "none"), "none")

    def on_decided(self, peer_id: PeerId, commit: Commit) -> ForkOutcome:
        """Return the outcomes that the next commit of our chain brings.

        We may have left this chain, with a contribution that it includes further on, and have come back to it before
        that commit: then the contribution was returned on the way. A later one that carries its work comes back now.
        """
        included = {entry.body.parts for entry in commit.contributions if entry.sender == peer_id}
        revised = self._revise_included(included)
        outcome = self.on_commits(peer_id, [commit], commit.round + 1)
        if revised and self.pending is not None:
            outcome = self._settle("excluded")
        return ForkOutcome(outcome, revised)

    def _revise_included(self, included: Set[Parts]) -> tuple[SettledContribution, ...]:
        """Revise the returned contributions that a commit includes, and whose work is still to be sent."""
        unsent = {self.pending.header.serial} if self.pending else set()
        revised: list[SettledContribution] = []
        for index, entry in reversed(list(enumerate(self.settled))):
            if entry.outcome != "excluded" or not (entry.resent_in is None or entry.resent_in in unsent):
                continue
            if entry.contribution.parts in included:
                self.settled[index] = replace(entry, outcome="included", previous_outcome=entry.outcome, resent_in=None)
                revised.append(self.settled[index])
            else:
                unsent.add(entry.contribution.header.serial)
        return tuple(revised)

    def on_fork(
        self, peer_id: PeerId, commits: Sequence[Commit], round_number: int, old_head: ChainHead
    ) -> ForkOutcome:
        """Revise all outcomes after a switch from `old_head` to another chain, or a jump further on the same one.

        The other chain may include our contributions in rounds that ended differently on ours.

        Args:
            peer_id: our own id.
            commits: the known commits of the new chain, one after another.
            round_number: our next round on it.
            old_head: the head that we left.
        """
        included = {entry.body.parts for commit in commits for entry in commit.contributions if entry.sender == peer_id}
        known_since = commits[0].round if commits and commits[-1].round == round_number - 1 else round_number
        is_ours = any((commit.round, commit.base) == (old_head.round, old_head.digest) for commit in commits)
        outcome = self._pending_outcome_on_fork(
            included, 0 if is_ours and known_since < round_number else known_since, round_number
        )
        if outcome == "none" and not is_ours and not self._counts_on_any_chain():
            outcome = "excluded"
        is_pending = outcome in ("none", "excluded")
        fork = ForkOutcome(outcome, () if is_ours else self._revise_settled(included, known_since, is_pending))
        if fork.retracts_restored and self.pending is not None and outcome == "none":
            fork = fork._replace(outcome="excluded")  # the pending one may carry that work too
        if fork.outcome != "none":
            self._settle(fork.outcome)
        return fork

    def _pending_outcome_on_fork(
        self, included: Set[Parts], known_since: int, round_number: int
    ) -> ContributionOutcome:
        """Return the outcome of the pending contribution on the new chain."""
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
        """Revise the settled contributions, newest first; return those whose outcome changed.

        Args:
            included: the parts of our contributions that the new chain includes.
            known_since: the first round of the new chain that is known here.
            is_unsent: whether the work in the pending contribution is still to be sent on that chain.
        """
        unsent = {self.pending.header.serial: is_unsent} if self.pending else {}
        revised: list[SettledContribution] = []
        for index, entry in reversed(list(enumerate(self.settled))):
            outcome: ContributionOutcome = "included" if entry.contribution.parts in included else "excluded"
            was_unsent = entry.outcome == "excluded" and (entry.resent_in is None or unsent.get(entry.resent_in, False))
            is_kept = entry.outcome == "excluded" or index >= len(self.settled) - MAX_RESTORABLE
            if outcome == "excluded" and (entry.submitted_since < known_since or not is_kept):
                outcome = "lost"
            is_revised = entry.outcome == "included" != outcome or (was_unsent and outcome != "excluded")
            if is_revised:
                self.settled[index] = replace(entry, outcome=outcome, previous_outcome=entry.outcome, resent_in=None)
                revised.append(self.settled[index])
            unsent[entry.contribution.header.serial] = outcome == "excluded" and (was_unsent or is_revised)
        return tuple(revised)

    def _is_included(self, peer_id: PeerId, commit: Commit) -> bool:
        entries = (contribution for contribution in commit.contributions if contribution.sender == peer_id)
        return self.pending is not None and any(entry.body.parts == self.pending.parts for entry in entries)

    def reject(self, contribution: StoredContribution, round_number: int) -> None:
        """Return a new contribution to its trainer unsent, because it carries work that must be subtracted."""
        self.pending = contribution
        self.submitted_since = round_number
        self._settle("excluded")

    def on_round(self, round_number: int) -> ContributionOutcome:
        """Return "excluded" if the pending contribution may not join round `round_number`, our next one."""
        if self.pending is None:
            return "none"
        self.submitted_since = min(self.submitted_since, round_number)
        return "none" if self._may_join(self.pending.header.round, round_number) else self._settle("excluded")

    def _may_join(self, made_for_round: int, round_number: int) -> bool:
        """Return whether a round may include it. Round numbers also decrease: on another chain, or after a restart."""
        plan = self._planner.plan
        return abs(round_number - made_for_round) <= MAX_AGE_ROUNDS and plan(made_for_round).is_compatible_with(
            plan(round_number)
        )

    def _counts_on_any_chain(self) -> bool:
        """Return whether the pending contribution, if there is one, counts from the weights of other chains too."""
        return self.pending is None or self._planner.plan(self.pending.header.round).counts_on_any_chain

    def _settle(self, outcome: ContributionOutcome) -> ContributionOutcome:
        assert self.pending is not None
        self.settled.append(SettledContribution(self.pending, self.submitted_since, outcome))
        self.last_outcome = self.pending.header.round, outcome
        self.pending = None
        return outcome

    def to_json(self) -> dict[str, Any]:
        return {"decided": self.last_outcome, "past": [entry.to_json() for entry in self.settled]}

    @classmethod
    def from_json(cls, planner: RoundPlanner, values: dict[str, Any]) -> "ContributionTracker":
        decided = values["decided"]
        settled = [SettledContribution.from_json(entry) for entry in values["past"]]
        return cls(planner, None if decided is None else (int(decided[0]), decided[1]), settled)
