"""The site of the documentation: its navigation leads to pages, and it builds without a warning."""

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from node.monitoring.status import Phase
from node.monitoring.status_reporter import OUTCOME_TEXTS, REJECT_TEXTS

ROOT = Path(__file__).parents[1]


def pages_of(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [page for one in (entry.values() if isinstance(entry, dict) else entry) for page in pages_of(one)]


def test_navigation_names_pages_that_exist_once_each() -> None:
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)  # it has a tag of mkdocs
    named = pages_of(settings["nav"])
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert len(named) == len(set(named)) and set(named) <= pages
    reference = {page for page in pages if page.startswith("reference/")}
    assert reference <= set(named) and len(named) > 25


@pytest.mark.slow
def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="in the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "Is it working?" in (tmp_path / "site" / "user" / "working" / "index.html").read_text()


WORKING = (ROOT / "docs" / "user" / "working.md").read_text()


def test_page_explains_each_phase_of_a_node() -> None:
    table = WORKING.split("## What the log says")[0].split("## What the node is doing")[1]
    explained = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    assert explained == ["word", *get_args(Phase)]


def test_page_explains_what_a_round_says_of_our_contribution() -> None:
    assert all(text in WORKING for text in OUTCOME_TEXTS.values())
    missed = (ROOT / "docs" / "reference" / "status.md").read_text().split("## Missed rounds")[1].split("\n## ")[0]
    assert all(f"| {word} |" in missed for word in REJECT_TEXTS)


def test_words_are_in_one_place_of_thirty_lines() -> None:
    words = (ROOT / "docs" / "reference" / "words.md").read_text()
    assert len(words.splitlines()) <= 30
    assert "## Glossary" not in (ROOT / "ARCHITECTURE.md").read_text()
