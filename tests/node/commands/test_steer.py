"""`murmur steer`: what it makes of its words, and what it says where it cannot steer."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node.commands.steer import (
    SteerOptions,
    changes_of,
    choose_round,
    parse_assignments,
    require_source_names,
    steer,
)
from node.daemon.steering.revision_store import RoundClock
from protocol.errors import MissingFileError, MurmurError, OrganiserError, UsageError
from protocol.identity import Identity
from protocol.manifest.run import Manifest
from protocol.manifest.sections import DataSection
from protocol.steering import RevisedManifest
from tests.node.small_run import MANIFEST

ORGANISER = Identity.create().peer_id


def test_assignments_take_numbers_words_and_none() -> None:
    found = parse_assignments(
        [
            "train.learning_rate=1e-3",
            "target.rounds = 200",
            "target.tokens=none",
            "about.description=A run, go on = yes",
            "data.weights={code = 1, books = 2.5}",
        ]
    )
    assert found == {
        "data.weights": {"code": 1, "books": 2.5},
        "train.learning_rate": 1e-3, "target.rounds": 200, "target.tokens": None,
        "about.description": "A run, go on = yes",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("target.rounds", "write KEY=VALUE"),
        ("model.width=8", "with one of the keys target.rounds, "),
        ("paused=true", "with one of the keys"),
        ("train.learning_rate=fast", "train.learning_rate"),
        ("target.rounds=0", "target.rounds"),
        ("target.rounds=[1, 2]", "target.rounds"),
    ],
)
def test_a_wrong_assignment_is_named(change: str, words: str) -> None:
    with pytest.raises(UsageError, match=words.replace(".", r"\.")):
        parse_assignments([change])


def test_actions_are_changes() -> None:
    assert changes_of("stop", 40) == {"target.rounds": 40} and changes_of("stop", 0) == {"target.rounds": 1}
    assert changes_of("pause", 40) == {"paused": True} and changes_of("resume", 40) == {"paused": False}
    assert changes_of(None, 40) == {}


@pytest.mark.parametrize(
    ("seconds", "paused", "expected"), [(0.0, False, 12), (60.0, False, 13), (0.5, False, 24), (60.0, True, 10)]
)
def test_default_round_leaves_time_for_all_peers_to_hear(seconds: float, paused: bool, expected: int) -> None:
    contact: Any = SimpleNamespace(round=10, tokens=0, round_seconds=seconds)
    manifest: Manifest = MANIFEST.model_copy(
        update={"membership": MANIFEST.membership.model_copy(update={"heartbeat": 2.0})}
    )
    options = SteerOptions(run="run.toml")
    assert choose_round(options, contact, RevisedManifest(manifest, paused)) == expected
    assert choose_round(SteerOptions(run="run.toml", from_round=3), contact, RevisedManifest(manifest)) == 3


def test_a_halted_run_takes_no_later_round() -> None:
    contact: Any = SimpleNamespace(round=10, tokens=0, round_seconds=1.0)
    options = SteerOptions(run="run.toml", action="resume", from_round=11)
    with pytest.raises(UsageError, match="makes no rounds after round 10"):
        choose_round(options, contact, RevisedManifest(MANIFEST, is_paused=True))


def test_clock_measures_rounds_by_the_most_advanced_peer() -> None:
    clock = RoundClock()
    for number, now in ((5, 0.0), (5, 3.0), (7, 8.0), (6, 9.0), (8, 12.0)):
        clock.observe(number, now)
    assert clock.round == 8 and clock.seconds == pytest.approx(0.3 * 4.0 + 0.7 * 4.0)
    assert RoundClock().seconds == 0.0


@pytest.mark.parametrize(
    ("key", "given", "kind", "words"),
    [
        ("", None, OrganiserError, "nobody can steer the run small"),
        (ORGANISER, None, MissingFileError, "name the organiser's key with --key FILE"),
        (ORGANISER, "other.key", OrganiserError, f"only {ORGANISER} may steer this run"),
    ],
    ids=["no organiser", "no key", "another key"],  # the workers must agree on them, and the key is random
)
def test_who_may_not_steer_is_told_before_anybody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, given: str | None, kind: type[MurmurError], words: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = MANIFEST.run.model_copy(update={"organiser_key": key})
    (tmp_path / "run.toml").write_text(MANIFEST.model_copy(update={"run": run}).to_toml())
    if given:
        Identity.load_or_create(tmp_path / given)
    options = SteerOptions(
        run=str(tmp_path / "run.toml"), changes=("target.rounds=9",), key=tmp_path / given if given else None
    )
    with pytest.raises(kind, match=words):
        steer(options)
    assert not (tmp_path / "state" / "murmur" / "organiser.key").exists(), "a key that is made now steers nothing"


def test_new_weights_must_name_the_sources(tmp_path: Path) -> None:
    single = MANIFEST.data
    sources = [{"name": name, "source": "text", "path": "*.txt"} for name in ("code", "books")]
    mixture = DataSection.model_validate_json(json.dumps({"sources": sources}))
    require_source_names(mixture, {"books": 1.0, "code": 2.0})
    require_source_names(mixture, None)
    for data, words in ((mixture, "name each source once: code, books"), (single, "this run has only one")):
        with pytest.raises(UsageError, match=words):
            require_source_names(data, {"code": 1.0})
