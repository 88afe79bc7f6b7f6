"""The queue of runs on a card: what is done again, what a budget leaves, what is recorded, and the counted work."""

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import card, device
from benchmarks.card_runs import ROOT, Part, Result, Run, RunFailed, Workshop
from benchmarks.comparison_tables import fill_tables
from node.model import shape_table
from protocol.manifest.reading import load_manifest

REPORT = {
    "rounds": 3,
    "initial_validation_loss": 5.0,
    "validation_loss": 4.0,
    "compute_share": 0.5,
    "digests": {"a": "1", "b": "1"},
    "agreed": True,
}


def words_of(tmp_path: Path, **changes: Any) -> argparse.Namespace:
    values: dict[str, Any] = {
        "only": None,
        "budget_minutes": 60.0,
        "again": False,
        "since": None,
        "commit": "new",
        "results": tmp_path / "card.json",
        "side": 1,
    }
    return argparse.Namespace(**(values | changes))


def fake_queue(monkeypatch: pytest.MonkeyPatch, faults: set[str]) -> list[str]:
    """Let every entry note its name instead of running; the ones in `faults` fail."""
    begun: list[str] = []

    def part_of(item: card.Item) -> Part:
        def run(shop: Workshop, seconds: float) -> Result:
            begun.append(item.name)
            if item.name in faults:
                raise RunFailed("it did not learn")
            return {"losses": [5.0, 4.0], "plain": shop.plain_loss}

        return run

    made = tuple(
        card.Item(item.name, item.minutes, part_of(item), item.question, item.is_timing) for item in card.QUEUE
    )
    monkeypatch.setattr(card, "QUEUE", made)
    monkeypatch.setattr(card, "newest_change", lambda: "old")
    monkeypatch.setattr(card, "is_ancestor", lambda older, newer: (older, newer) != ("old", "older"))
    return begun


def test_queue_begins_with_what_all_are_compared_with_and_ends_with_timings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun = fake_queue(monkeypatch, faults=set())
    made = card.Queue(words_of(tmp_path), "cuda", "a card").run(tmp_path)
    assert [row["name"] for row in made] == begun == [item.name for item in card.QUEUE]
    assert begun[0] == "plain" and begun[-2:] == ["law 3M and 10M", "law 30M and 124M"]
    assert made[1]["result"]["plain"] == 4.0, "others are compared with its loss"
    kept = json.loads((tmp_path / "card.json").read_text())
    assert all({"command", "device", "commit", "date", "result", "right"} <= set(row) for row in kept)


def test_result_that_stands_is_not_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Control: one that was wrong, one of an older product and one of another device are measured again."""
    begun = fake_queue(monkeypatch, faults={"fp8"})
    names = ["plain", "fp8", "Muon"]
    card.Queue(words_of(tmp_path, only=names), "cuda", "a card").run(tmp_path)
    assert begun == names
    card.Queue(words_of(tmp_path, only=names, commit="newer"), "cuda", "a card").run(tmp_path)
    assert begun == [*names, "fp8"]
    rows = json.loads((tmp_path / "card.json").read_text())
    (tmp_path / "card.json").write_text(json.dumps([row | {"commit": "older"} for row in rows if row["right"]]))
    card.Queue(words_of(tmp_path, only=["Muon"]), "cuda", "a card").run(tmp_path)
    card.Queue(words_of(tmp_path, only=["plain"]), "cuda", "another").run(tmp_path)
    assert begun == [*names, "fp8", "Muon", "plain"]


def test_nothing_begins_that_may_end_after_the_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun = fake_queue(monkeypatch, faults=set())
    made = card.Queue(words_of(tmp_path, budget_minutes=1.2), "cuda", "a card").run(tmp_path)
    assert begun == [item.name for item in card.QUEUE if item.minutes <= 1.2] and len(made) == len(begun)


def test_cpu_has_no_timings(tmp_path: Path) -> None:
    queue = card.Queue(words_of(tmp_path), "cpu", "cpu")
    assert {item.name for item in card.QUEUE} - {item.name for item in queue.items} == {
        item.name for item in card.QUEUE if item.is_timing
    }
    assert "to do" in queue.describe() and len(queue.describe().splitlines()) == len(queue.items) + 1


@pytest.mark.parametrize("device_name", ["cpu", "cuda"])
def test_manifest_of_every_run_can_be_read(tmp_path: Path, device_name: str) -> None:
    shop = Workshop(tmp_path, device_name, cards=2)
    for item in card.QUEUE:
        if isinstance(item.part, Run):
            manifest = load_manifest(item.part.write_manifest(shop, shop.folder(item.part.name)))
            assert shape_table(manifest.model).numel > 0


def test_manifest_of_an_adapter_has_no_size_of_its_model(tmp_path: Path) -> None:
    shop = Workshop(tmp_path, "cpu")
    text = Run("adapter", model='from = "base"').write_manifest(shop, tmp_path).read_text()
    assert 'from = "base"' in text and "width" not in text and "context" not in text and "batch_tokens = 512" in text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"agreed": False}, "do not agree"),
        ({"validation_loss": 5.0}, "the validation loss went from 5.0"),
        ({"validation_loss": 4.3}, "4.0000 without the option"),
    ],
)
def test_run_that_is_wrong_is_said_to_be(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    """Control: the report without the change is right."""
    run, shop = Run("fp8", compares=True), Workshop(tmp_path, "cuda", plain_loss=4.0)
    assert run._check(REPORT, shop)["above_plain"] == 0
    with pytest.raises(RunFailed, match=reason):
        run._check(REPORT | change, shop)


def test_speed_is_that_after_the_first_round() -> None:
    lines = [
        {"time": time, "tokens": tokens, "round": number}
        for time, tokens, number in ((0, 0, 0), (90, 100, 0), (100, 200, 1), (110, 1200, 2), (120, 2200, 3))
    ]
    assert card.steady_speed(lines) == 100.0
    with pytest.raises(RunFailed):
        card.steady_speed(lines[:3])


def test_speed_is_compared_with_the_bare_step_and_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"size": "0.6B", "where": {"device": "cuda H200"}, "ways": {"ours compiled": {"tokens_per_second": 1e5}}}
    monkeypatch.setattr(card, "read_results", lambda: [row])
    found = card.compare_speed("0.6B", 9e4, "cuda H200", 0.999)
    assert found["share_of_bare"] == 0.9 and found["missed"] == ["share_of_bare", "mfu"][: 1 + (found["mfu"] < 0.4)]
    assert card.compare_speed("0.6B", 9.9e4, "cuda other", 0.98)["missed"] == ["computing"]


def test_formula_counts_the_products_of_the_model() -> None:
    """Control: a formula without attention misses what torch counts."""
    size = device.SIZES["10M"]
    numel = shape_table(size.model).numel
    counted = card.counted_flops(size)
    # The formula counts the gains of norms, and the matrix of the embedding once, as that of the output.
    assert counted == pytest.approx(size.tokens * device.flops_per_token(size.model, numel), rel=0.01)
    assert counted > 1.02 * size.tokens * 6 * numel


def test_commit_that_came_before_is_known() -> None:
    newest = card.newest_change()
    if not newest:
        pytest.skip("no git here")
    assert card.is_ancestor(newest, "HEAD")
    parent = subprocess.run(["git", "rev-parse", f"{newest}^"], capture_output=True, text=True, cwd=ROOT, check=False)
    if parent.returncode == 0:  # a shallow clone has no parent
        assert not card.is_ancestor("HEAD", parent.stdout.strip())


def test_the_documentation_shows_the_results_that_are_kept() -> None:
    rows = json.loads(card.RESULTS.read_text()) if card.RESULTS.exists() else []
    text = device.PAGE.read_text()
    made = {"queue": card.queue_table(rows)}
    assert "<!-- compared: queue -->" in text and "<!-- compared: roof -->" in text
    assert fill_tables(text, made) == text, "python -m benchmarks.card"
    assert all(f"| {size} |" in text.partition("<!-- compared: roof -->")[2] for size in ("0.6B", "1B", "3B"))
