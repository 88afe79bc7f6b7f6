"""The organiser's revisions as the host knows them: which there are, and from which round each holds. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from node.dashboard.events import RevisionReport, RunFacts, RunSteered
from protocol.consensus.messages.contributions import Commit
from protocol.consensus.messages.signed import Digest
from protocol.manifest.run import Manifest
from protocol.steering import PAUSED_KEY, RevisedManifest, SignedRevision, describe_changes, is_stop, manifest_of_round


class AdoptionRecord:
    """The round after which a commit that the host has seen first names each revision."""

    def __init__(self) -> None:
        self.newest: Digest = b""
        self._rounds: dict[Digest, int] = {}

    def record(self, commits: Sequence[Commit]) -> None:
        """Record the revisions that commits of the trusted chain name."""
        for commit in commits:
            self.newest = commit.adoption.newest
            for digest in (*(entry.digest for entry in commit.adoption.added), self.newest):
                self._rounds[digest] = min(commit.round + 1, self._rounds.get(digest, commit.round + 1))

    def holds_from(self, revision: SignedRevision, before: Mapping[int, RevisionReport]) -> int | None:
        """Return the first round for which a revision holds; None while no commit names it.

        `before` are the reports by number that the host made earlier, perhaps before a restart.
        """
        known = before.get(revision.body.number)
        if known is not None and known.time == revision.body.time and known.holds_from is not None:
            return known.holds_from
        adopted = self._rounds.get(revision.digest)
        return None if adopted is None else max(adopted, revision.body.from_round)


def build_reports(
    revisions: Sequence[SignedRevision], adoptions: AdoptionRecord, before: RunSteered | None
) -> tuple[RevisionReport, ...]:
    """Return a report of each revision."""
    known = {report.number: report for report in before.revisions} if before else {}
    return tuple(
        RevisionReport(
            number=entry.body.number,
            from_round=entry.body.from_round,
            changes=dict(entry.body.values),
            time=entry.body.time,
            holds_from=adoptions.holds_from(entry, known),
        )
        for entry in revisions
    )


def revision_values(report: RevisionReport) -> dict[str, Any]:
    """Return a revision for the page, with its text."""
    words = (describe_change(key, value, report.from_round) for key, value in report.changes.items())
    since = f"from round {report.from_round:,}, not adopted yet"
    if report.holds_from is not None:
        since = f"since round {report.holds_from:,}"
    return report.model_dump() | {"text": f"{report.number}: {', '.join(words)}, {since}"}


def describe_change(key: str, value: object, from_round: int) -> str:
    """Return a change as people read it."""
    if key == PAUSED_KEY:
        return "pause" if value else "resume"
    if is_stop(key, value, from_round):
        return "stop"
    return f"{key} = {'none' if value is None else json.dumps(value, ensure_ascii=False)}"


def manifest_at_head(
    base: Manifest, revisions: Sequence[SignedRevision], reports: Sequence[RevisionReport], round_number: int
) -> RevisedManifest:
    """Return the manifest of the next round, as far as the host knows."""
    pairs = zip(revisions, reports, strict=True)
    in_force = [entry.body for entry, report in pairs if (report.holds_from or entry.body.from_round) <= round_number]
    return manifest_of_round(base, in_force, round_number)


def describe_news(
    revisions: Sequence[SignedRevision], reports: Sequence[RevisionReport], before: RunSteered | None
) -> str:
    """Return the log line of a revision that is new or has begun to hold; empty if there is none."""
    known = {report.number: report for report in before.revisions} if before else {}
    for entry, report in reversed(list(zip(revisions, reports, strict=True))):
        earlier = known.get(report.number)
        if report.holds_from is not None and (earlier is None or earlier.holds_from is None):
            return f"revision {describe_changes(entry.body)}, holds from round {report.holds_from}"
        if earlier is None:
            return f"revision {describe_changes(entry.body)}, from round {report.from_round}"
    return ""


def is_news(facts: RunFacts, steered: RunSteered, known_facts: RunFacts | None, known: RunSteered | None) -> bool:
    """Return whether the host should record an event: something differs from what it recorded."""
    if known is None:
        return bool(steered.revisions)
    return (facts, steered.revisions, steered.is_paused) != (known_facts, known.revisions, known.is_paused)
