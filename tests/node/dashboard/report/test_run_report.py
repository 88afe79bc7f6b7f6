"""The words of a report, with names and samples that try to break the page or the terminal."""

import re
from pathlib import Path

from node.dashboard.run_report import ContributorReport, RunReport, write_report
from tests.node.daemon.receipts.example_commits import MARY, TOM

HOSTILE = "[x](http://evil)|<b>\x1b[31m\n# head"


def report(**fields: object) -> RunReport:
    mary = ContributorReport(
        peer=MARY.peer_id, name="mary", tokens=750, share=0.75, rounds=3, seconds=7200, size=4_200_000
    )
    tom = mary.model_copy(update={"peer": TOM.peer_id, "name": HOSTILE, "tokens": 250, "share": 0.25})
    values = {
        "run": "small",
        "run_id": "ab" * 32,
        "recipe": "diloco",
        "parameters": 1_000_000,
        "tokens": 1000,
        "rounds": 3,
        "seconds": 288.4,
        "initial_validation_loss": 5.162,
        "validation_loss": 1.25,
        "contributors": (mary, tom),
        "sample": "def f():\n    return `1`\x1b[2J",
    }
    return RunReport.model_validate({**values, **fields})


def test_terminal_and_markdown_have_the_same_figures() -> None:
    lines, page = report().lines(), report().markdown()
    assert lines[0] == "tokens           1,000 in 3 rounds"
    assert lines[1] == "time in rounds   4 min 48 s"
    assert lines[2] == "validation loss  5.162 -> 1.250 nats per token, of the shared model"
    assert "| tokens | 1,000 in 3 rounds |" in page and "| time in rounds | 4 min 48 s |" in page
    assert "| validation loss | 5.162 -> 1.250 nats per token, of the shared model |" in page
    assert "| mary | 750 | 75.0% | 3 | 2 h | 4.2 MB |" in page


def test_text_of_others_controls_neither_terminal_nor_page() -> None:
    page = report(run=HOSTILE).markdown()
    assert "\x1b" not in page and "\x1b" not in "\n".join(report().lines())
    assert "[x](http" not in page and "\n# head" not in page and not re.search(r"(?<!\\)<b>", page)
    rows = [line for line in page.split("## Who")[1].splitlines() if line.endswith("` |")]
    assert [len(re.findall(r"(?<!\\)\|", row)) for row in rows] == [8, 8]
    assert "    def f():\n        return `1`" in page


def test_unknown_figures_are_left_out() -> None:
    empty = report(validation_loss=None, contributors=(), sample="", missing_rounds=2)
    assert not any("validation" in line for line in empty.lines())
    assert "2 of them unknown to the host" in empty.lines()[0] and "Who gave" not in empty.markdown()
    measured_once = report(initial_validation_loss=None, validation_loss=2.0)
    assert "validation loss  2.000 nats per token, of the shared model" in measured_once.lines()


def test_files_hold_the_report(tmp_path: Path) -> None:
    write_report(tmp_path, report())
    assert RunReport.model_validate_json((tmp_path / "report.json").read_text()) == report()
    assert (tmp_path / "report.md").read_text() == report().markdown()
