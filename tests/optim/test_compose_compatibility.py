import pytest

from optim.compose import compose
from optim.errors import UnknownOption
from optim.recipes import OptionTables
from tests.optim.fake_peers import constant

REFUSED: list[tuple[str, OptionTables, str]] = [
    ("noloco", {"signal": {"kind": "pseudo-gradient"}}, "'gossip' does not accept signal 'pseudo-gradient'"),
    ("diloco", {"signal": {"kind": "weights"}}, "it accepts 'pseudo-gradient' or 'gradient' or 'inner-state'"),
    ("gossip-adam", {"update": {"kind": "sgd"}}, "'sgd' does not accept signal 'weights'"),
    ("one-bit-adam", {"signal": {"beta": 0.8}}, "update.beta1 = 0.9 are the same momentum"),
    ("one-bit-adam", {"update": {"kind": "adam"}}, "'adam' does not accept signal 'momentum'"),
    ("one-bit-adam", {"codec": {"kind": "sign"}}, 'set codec.kind = [{ value = "none", rounds = 100 }, "sign"]'),
    ("one-bit-adam", {"update": {"warm_rounds": 200}}, 'set codec.kind = [{ value = "none", rounds = 200 }, "sign"]'),
    ("diloco", {"topology": {"kind": "groups"}}, "set update.kind to gossip"),
    ("noloco-weights", {"update": {"beta": 1.9}}, "lower update.beta"),
    ("des-loc", {"adoption": {"unsent": 0.5}}, "the residual of signal 'inner-state' is not progress"),
    ("noloco", {"update": {"gamma": 0.0}}, "raise update.gamma above 0"),
    ("sparseloco", {"aggregate": {"kind": "trimmed-mean"}}, "set aggregate.kind = 'filtered'"),
    ("sparseloco", {"aggregate": {"kind": "median"}}, "codec 'topk' sends few coordinates"),
    ("demo", {"aggregate": {"kind": "krum"}}, "codec 'dct-topk' sends few coordinates"),
    ("frugal", {"aggregate": {"kind": "centred-clip"}}, 'set aggregate = { kind = "filtered", over = "senders" }'),
    ("frugal", {"aggregate": {"kind": "filtered", "over": "members"}}, "would shorten its steps"),
    ("noloco", {"aggregate": {"kind": "median"}}, "cannot find a liar in groups of 2"),
    ("noloco-weights", {"aggregate": {"kind": "filtered"}}, "cannot find a liar in groups of 2"),
    ("spsa", {"aggregate": {"kind": "filtered"}}, "codec 'direction' does not show"),
    ("one-bit-adam", {"aggregate": {"kind": "filtered"}}, "signal 'momentum'"),
]
ALLOWED: list[tuple[str, OptionTables]] = [
    ("frugal", {}),
    ("frugal", {"aggregate": {"agreement": 0.1}}),
    ("frugal", {"aggregate": {"kind": "sender-mean"}}),
    ("sparseloco", {"aggregate": {"kind": "filtered"}}),
    ("sparseloco", {"aggregate": {"kind": "centred-clip"}}),
    ("sparseloco-senders", {"aggregate": {"kind": "filtered", "over": "senders"}}),
    ("detonation-random", {"aggregate": {"kind": "trimmed-mean"}}),
    *(("averaging", {"aggregate": {"kind": kind}}) for kind in ("trimmed-mean", "median", "krum", "centred-clip")),
    *(("edit", {"aggregate": {"kind": kind}}) for kind in ("filtered", "krum")),
]


@pytest.mark.parametrize(("recipe", "changes"), ALLOWED, ids=lambda value: str(value)[:40])
def test_defences_that_keep_the_recipe_are_accepted(recipe: str, changes: OptionTables) -> None:
    compose(recipe, changes)


@pytest.mark.parametrize(("recipe", "changes", "reason"), REFUSED, ids=lambda value: str(value)[:40])
def test_incompatible_components_are_refused_in_one_line(recipe: str, changes: OptionTables, reason: str) -> None:
    with pytest.raises(UnknownOption) as refusal:
        compose(recipe, changes)
    assert reason in str(refusal.value) and "\n" not in str(refusal.value)


def test_incompatibility_of_a_later_round_is_refused_before_the_run() -> None:
    with pytest.raises(UnknownOption, match="do not converge"):
        compose("noloco", {"update": {"alpha": [constant(0.5, 100), 0.9]}})
    compose("noloco", {"update": {"alpha": [constant(0.5, 100), 0.6]}})
