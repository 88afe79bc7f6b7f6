"""The comparison of our step with a plain torch loop: what is measured again, and what the documentation shows."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from benchmarks import activations, device
from benchmarks.comparison_tables import fill_tables

WORDS = argparse.Namespace(threads=1, again=False, device="cpu", seconds=1.0)
WAYS = {way: {"tokens_per_second": 10.0, "steps": 3} for way in device.WAYS}


def test_row_of_this_commit_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured: list[str] = []
    commits = ["a"]

    def measure(name: str, _: argparse.Namespace) -> device.Row:
        measured.append(name)
        return {"ways": WAYS, "ratio": 1.0}

    monkeypatch.setattr(device, "RESULTS", tmp_path / "device.json")
    monkeypatch.setattr(device, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(device, "commit", lambda: commits[0])
    monkeypatch.setattr(device, "in_process", measure)
    device.PAGE.write_text("a\n<!-- compared: devices -->\n\n\n<!-- end -->\n")
    for name, count in (("25M", 1), ("10M", 2), ("25M", 2)):
        assert device.row_of(name, torch.device("cpu"), WORDS) is not None and len(measured) == count
    commits[:] = ["b"]
    device.row_of("10M", torch.device("cpu"), WORDS)
    assert measured == ["25M", "10M", "10M"]
    kept = json.loads(device.RESULTS.read_text())
    assert [(row["size"], row["made"]["commit"]) for row in kept] == [("10M", "b"), ("25M", "a")]
    assert "| 10M |" in device.PAGE.read_text()


def test_ratio_is_the_median_over_turns() -> None:
    taken = {"plain": [1.0, 8.0, 2.0], "ours": [2.0, 8.0, 1.0]}  # another program slowed the second turn down
    assert device.ratios_of(taken) == {"ratio": 1.0}


def test_the_documentation_shows_the_results_that_are_kept() -> None:
    made = {"devices": device.make_table(device.read_results())}
    made |= activations.make_tables(json.loads(activations.RESULTS.read_text()))
    text = device.PAGE.read_text()
    assert all(f"<!-- compared: {name} -->" in text for name in made)
    assert fill_tables(text, made) == text, "python -m benchmarks.device, python -m benchmarks.activations"
