"""The report of a run as figures, and the words for people.

`report.json` holds the figures, `report.md` the words. Names and samples come from other people: they are sanitized
where they are printed, and escaped in Markdown.
"""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from node.commands.eval.results import RESULT_HEADINGS, Result, result_rows
from node.monitoring.logs import sanitize
from node.units import format_bytes, format_plural
from protocol.files import write_atomically
from protocol.identity import PeerId

REPORT_JSON, REPORT_MARKDOWN = "report.json", "report.md"
Outcome = Literal["done", "stopped", "running"]
OUTCOME_WORDS: dict[Outcome, str] = {
    "done": "The run has reached its target.",
    "stopped": "The organiser has stopped the run.",
    "running": "The run is under way; these are the figures so far.",
}
MARKDOWN_SPECIAL = r"\`*_[]<#|~&"  # the rest means nothing in the middle of a line


class ReportModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ContributorReport(ReportModel):
    """The counted work of one peer; `seconds` are those of the rounds that include it."""

    peer: PeerId
    name: str
    tokens: int
    share: float = Field(description="of the run's tokens, from 0 to 1")
    rounds: int
    seconds: float
    size: int = Field(description="bytes of its counted contributions")


class RunReport(ReportModel):
    """The figures of a run; losses are in nats per token, and `None` means that nobody measured it."""

    run: str
    run_id: str
    recipe: str
    outcome: Outcome = "done"
    parameters: int
    tokens: int
    rounds: int
    seconds: float = Field(description="of the rounds together, without the time before the first peers came")
    initial_loss: float | None = None
    loss: float | None = None
    initial_validation_loss: float | None = None
    validation_loss: float | None = None
    contributors: tuple[ContributorReport, ...] = ()
    missing_rounds: int = 0
    evaluations: tuple[Result, ...] = Field(default=(), description="the newest result of each metric of `murmur eval`")
    sample: str = Field(default="", description="text of the final model, beginning with the prompt")

    def facts(self) -> list[tuple[str, str]]:
        """Return label and text of each figure, for the terminal and for Markdown."""
        return [fact for fact in (*self._work_facts(), ("parameters", f"{self.parameters:,}")) if fact[1]]

    def _work_facts(self) -> list[tuple[str, str]]:
        missing = f", {self.missing_rounds:,} of them unknown to the host" if self.missing_rounds else ""
        rounds = format_plural(self.rounds, "round")
        return [
            ("tokens", f"{self.tokens:,} in {rounds}{missing}, {format_seconds(self.seconds)}"),
            ("training loss", describe_change(self.initial_loss, self.loss)),
            ("validation loss", describe_change(self.initial_validation_loss, self.validation_loss)),
        ]

    def lines(self) -> list[str]:
        """Return the report for a terminal."""
        sample = sanitize(self.sample, allowed="\n").splitlines()
        return [
            *(f"{label:<17}{text}" for label, text in self.facts()),
            *(["sample", *(f"    {line}" for line in sample)] if sample else ()),
        ]

    def markdown(self) -> str:
        """Return the report as a Markdown page."""
        facts = [("recipe", self.recipe), *self.facts()]
        rows = "".join(f"| {label} | {escape_markdown(text)} |\n" for label, text in facts)
        parts = [
            f"# {escape_markdown(self.run)}\n\n{OUTCOME_WORDS[self.outcome]}\n\n",
            f"| figure | value |\n|---|---|\n| run | `{self.run_id}` |\n{rows}",
        ]
        if self.contributors:
            parts.append(f"\n## Who gave what\n\n{self._contributor_table()}")
        if self.evaluations:
            parts.append(f"\n## Evaluations\n\n{self._evaluation_table()}")
        if self.sample:
            text = "".join(f"    {line}\n" for line in sanitize(self.sample, allowed="\n").splitlines())
            parts.append(f"\n## Text that the model writes\n\n{text}")
        return "".join(parts)

    def _evaluation_table(self) -> str:
        head = f"| {' | '.join(RESULT_HEADINGS)} |\n|---|---|{'---:|' * (len(RESULT_HEADINGS) - 2)}\n"
        rows = result_rows(self.evaluations)
        return head + "".join(f"| {' | '.join(map(escape_markdown, row))} |\n" for row in rows)

    def _contributor_table(self) -> str:
        head = "| name | tokens | share | rounds | time | sent | peer |\n|---|---:|---:|---:|---:|---:|---|\n"
        return head + "".join(
            f"| {escape_markdown(one.name)} | {one.tokens:,} | {one.share:.1%} | {one.rounds:,} "
            f"| {format_seconds(one.seconds)} | {format_bytes(one.size)} | `{one.peer}` |\n"
            for one in self.contributors
        )


def format_seconds(seconds: float) -> str:
    """Return a duration in seconds, minutes or hours, without unneeded digits."""
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:,.1f} h"


def describe_change(before: float | None, after: float | None) -> str:
    """Return how a loss changed; empty if it is not known."""
    if after is None:
        return ""
    return f"{after:.3f} nats per token" if before is None else f"{before:.3f} -> {after:.3f} nats per token"


def escape_markdown(text: str) -> str:
    """Return text that Markdown shows as it is, on one line."""
    return "".join(f"\\{char}" if char in MARKDOWN_SPECIAL else char for char in sanitize(text))


def write_report(folder: Path, report: RunReport) -> None:
    """Write the report as JSON and as Markdown. Raises StorageError."""
    write_atomically(folder / REPORT_JSON, report.model_dump_json(indent=2).encode() + b"\n")
    write_atomically(folder / REPORT_MARKDOWN, report.markdown().encode())
