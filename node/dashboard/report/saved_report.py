"""The report of a run in its folder, which later evaluations complete."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from node.commands.eval.results import Result
from node.commands.up.report import FinalReport
from node.dashboard.report.run_report import REPORT_JSON, RunReport, write_report
from node.run_dir import read_json_if_whole


def update_report(folder: Path, evaluations: Sequence[Result]) -> None:
    """Write the report of a finished run again, with these results; a folder without one is left as it is."""
    values = read_json_if_whole(folder / REPORT_JSON)
    report = _parse(values | {"evaluations": [result.model_dump() for result in evaluations]}) if values else None
    if report is not None:
        write_report(folder, report)


def _parse(values: dict[str, object]) -> RunReport | None:
    for kind in (FinalReport, RunReport):  # of `murmur up`, and of a host
        try:
            return kind.model_validate(values)
        except ValidationError:
            continue
    return None  # of another version
