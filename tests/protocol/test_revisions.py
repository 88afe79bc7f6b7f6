"""Revisions: which changes they may make, and the manifest of a round that they lead to."""

from typing import Any

import pytest

from protocol.errors import MalformedError, UsageError
from protocol.steering import (
    MAX_REVISIONS,
    REFERENCE_MANIFEST,
    STEERABLE,
    Revision,
    encode_changes,
    manifest_of_round,
    parse_changes,
    steerable_keys,
)

NEW_VALUES: dict[str, Any] = {
    "target.rounds": 200, "target.tokens": None, "target.keepers": 3,
    "train.learning_rate": 1e-4, "train.warmup_steps": 5, "train.decay_steps": 900, "train.final_share": 0.2,
    "train.weight_decay": 0.0, "train.clip": 2.0,
    "round.grace": 3.0, "round.leader_timeout": 4.0, "round.exchange_timeout": 9.0,
    "checkpoint.every_rounds": 4, "checkpoint.keep": 3,
    "about.description": "a run", "about.organiser": "Ada", "about.data": "text", "about.licence": "MIT",
    "about.url": "https://example.org/run",
    "admission.revoked": ["12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"],
    "anneal.share": 0.1, "anneal.final_share": 0.05,
    "data.weights": {"books": 2.5, "code": 0.0},
    "paused": True,
}  # fmt: skip


def revision(number: int, from_round: int, **values: Any) -> Revision:
    changes = encode_changes({key.replace("__", "."): value for key, value in values.items()})
    return Revision(number, bytes(32) if number > 1 else b"", from_round, changes, float(number))


@pytest.mark.parametrize("key", steerable_keys())
def test_every_steerable_key_changes_its_value_and_no_other(key: str) -> None:
    changes = Revision(1, b"", 5, encode_changes({key: NEW_VALUES[key]}), 1.0)
    before, after = (manifest_of_round(REFERENCE_MANIFEST, [changes], number) for number in (4, 5))
    assert before.manifest == REFERENCE_MANIFEST and not before.is_paused
    if key == "paused":
        assert after.is_paused and after.manifest == REFERENCE_MANIFEST
        return
    tables = REFERENCE_MANIFEST.model_dump(mode="json")
    section, _, name = key.partition(".")
    tables[section][name] = NEW_VALUES[key]
    assert after.manifest.model_dump(mode="json") == tables


@pytest.mark.parametrize(
    "key",
    [
        "run.seed", "run.organiser_key", "run.name", "model.width", "data.path", "data.tokenizer", "method.recipe",
        "train.batch_tokens", "train.beta1", "membership.expiry", "round.parts", "target", "train.", "run.min_peers",
        "", "paused.now",
    ],
)  # fmt: skip
def test_keys_that_decide_what_the_weights_mean_cannot_be_changed(key: str) -> None:
    with pytest.raises(UsageError, match="cannot change"):
        encode_changes({key: 1})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.learning_rate", 0.0), ("train.learning_rate", "fast"), ("train.learning_rate", True),
        ("train.learning_rate", None), ("target.rounds", 0), ("target.rounds", 1.5), ("round.grace", -1.0),
        ("paused", 1), ("paused", None), ("about.url", "javascript:1"), ("about.description", "a\nb"),
        ("about.description", "x" * 1001), ("train.final_share", 1.1), ("target.rounds", [1]),
        ("admission.revoked", ["me"]), ("admission.revoked", "12D3"), ("admission.revoked", None),
        ("data.weights", {"a": -1.0}), ("data.weights", {"a": 0.0}), ("data.weights", {}),
        ("data.weights", {"A b": 1.0}), ("data.weights", 1.0),
        ("data.weights", {f"s{number}": 1.0 for number in range(17)}),
    ],
)  # fmt: skip
def test_values_keep_the_bounds_of_the_manifest(key: str, value: Any) -> None:
    with pytest.raises(UsageError):
        encode_changes({key: value})


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", "[]", "1", "null", '{"paused": true}', '{"paused":true,"paused":true}', '{"target.rounds":1e999}',
        '{"train.clip":NaN}', '{"target.rounds":2,"paused":true}', "[" * 3000, '{"about.data":"' + "x" * 4000 + '"}',
    ],
)  # fmt: skip
def test_changes_have_one_canonical_text(text: str) -> None:
    with pytest.raises(MalformedError):
        parse_changes(text)


def test_later_revisions_win_from_their_own_round_on() -> None:
    entries = [
        revision(1, 10, train__learning_rate=0.1, target__rounds=50),
        revision(2, 30, train__learning_rate=0.2),
        revision(3, 20, train__learning_rate=0.3),
    ]
    rates = [
        manifest_of_round(REFERENCE_MANIFEST, entries, number).manifest.train.learning_rate for number in range(40)
    ]
    assert rates == [1.0] * 10 + [0.1] * 10 + [0.3] * 20, "the newest revision that holds wins"
    assert manifest_of_round(REFERENCE_MANIFEST, entries, 39).manifest.target.rounds == 50


def test_the_target_is_reached_by_rounds_or_tokens() -> None:
    entries = [revision(1, 0, target__rounds=5, target__tokens=100)]
    state = manifest_of_round(REFERENCE_MANIFEST, entries, 0)
    assert [state.is_target_reached(rounds, tokens) for rounds, tokens in ((4, 99), (5, 0), (0, 100))] == [
        False, True, True,
    ]  # fmt: skip
    assert not manifest_of_round(REFERENCE_MANIFEST, [], 0).is_target_reached(10**6, 10**12)


@pytest.mark.parametrize(
    "changed",
    [{"number": 0}, {"number": MAX_REVISIONS + 1}, {"number": 2}, {"previous": bytes(32)}, {"previous": b"x"},
     {"from_round": 2**40}, {"time": float("nan")}, {"time": -1.0}, {"changes": "{}"}],
)  # fmt: skip
def test_a_revision_out_of_bounds_is_refused(changed: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"number": 1, "previous": b"", "from_round": 3, "changes": '{"paused":true}', "time": 1.0}
    good = Revision(**fields)
    assert Revision.from_wire(good.to_wire()) == good
    with pytest.raises(MalformedError):
        Revision.from_wire(Revision(**fields | changed).to_wire())


def test_the_table_has_keys_of_the_manifest_only() -> None:
    tables = REFERENCE_MANIFEST.model_dump()
    assert all(name in tables[section] for section, names in STEERABLE.items() for name in names)
    assert set(steerable_keys()) == NEW_VALUES.keys()
