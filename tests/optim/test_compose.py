import contextlib
from collections.abc import Mapping

import pytest

from optim.codecs.floats import Float16
from optim.codecs.int_blocks import BlockInt8
from optim.codecs.topk import ChunkTopK
from optim.compatibility import ROBUST
from optim.compose import CODECS, COMPONENTS, OUTER_OPTIMIZERS, REGISTRY, SIGNALS, compose
from optim.errors import UnknownOption, UnknownRecipe
from optim.feedback import ErrorFeedback, NoFeedback
from optim.options import Scalar
from optim.outer import Nesterov, Sgd
from optim.recipes import RECIPES
from optim.topologies import ButterflyOptions, GatherOptions
from tests.optim.fake_peers import NO_PROGRESS, Tables, constant, curve


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_composes_and_names_its_paper(name: str) -> None:
    method = compose(name)
    assert method.name == name and method.paper.startswith("arXiv ")
    assert set(RECIPES[name].tables) == set(COMPONENTS)


def test_diloco_recipe() -> None:
    method = compose("diloco")
    assert method.codec == BlockInt8(block=256)
    assert method.feedback == ErrorFeedback(decay=1.0)
    assert method.topology == ButterflyOptions()
    assert method.update == Nesterov(learning_rate=0.7, momentum=0.9, shorten=True)


def test_sparseloco_recipe() -> None:
    method = compose("sparseloco")
    assert method.codec == ChunkTopK(k=64, chunk=4096)
    assert method.feedback == ErrorFeedback(decay=0.95)
    assert method.topology == GatherOptions()
    assert method.update == Sgd(learning_rate=1.0)


def test_overrides_replace_options_and_kinds() -> None:
    method = compose(
        "diloco", {"schedule": {"inner_steps": 7}, "codec": {"kind": "fp16"}, "feedback": {"kind": "none"}}
    )
    assert method.schedule.inner_steps == 7 and method.schedule.ahead == 0
    assert method.codec == Float16() and method.feedback == NoFeedback()
    assert compose("sparseloco", {"topology": {"kind": "butterfly"}}).topology == ButterflyOptions()


def test_different_kind_starts_from_its_own_defaults() -> None:
    assert compose("sparseloco", {"codec": {"kind": "int8"}}).codec == BlockInt8()
    assert compose("sparseloco", {"codec": {"kind": "topk", "chunk": 64}}).codec == ChunkTopK(k=64, chunk=64)


def test_integer_is_accepted_for_a_float_option() -> None:
    assert compose("diloco", {"update": {"learning_rate": 1}}).update == Nesterov(
        learning_rate=1.0, momentum=0.9, shorten=True
    )


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("part", ["codec", "feedback", "aggregate", "adoption", "schedule"])
def test_every_kind_of_most_components_fits_every_recipe(recipe: str, part: str) -> None:
    """The exceptions: error feedback with a residual that would only grow, and signs while squares are learned."""
    tables = RECIPES[recipe].tables
    defences = {rule.kind for rule in ROBUST}  # those that fit: test_compose_compatibility.py
    for kind, built in REGISTRY[part].items():
        if kind in defences:
            continue
        chosen = {other: str(kind if other == part else tables[other]["kind"]) for other in ("codec", "feedback")}
        grows = chosen["feedback"] == "error" and chosen["codec"] == "direction"
        tells_nothing = tables["update"]["kind"] == "frozen-adam" and chosen["codec"] == "sign"
        refused = "grow without bound" if grows else "signs do not contain" if tells_nothing else ""
        with pytest.raises(UnknownOption, match=refused) if refused else contextlib.nullcontext():
            assert isinstance(getattr(compose(recipe, {part: {"kind": kind}}), part), built)


@pytest.mark.parametrize("kind", OUTER_OPTIMIZERS)
def test_outer_optimizer_accepts_only_the_signals_it_lists(kind: str) -> None:
    for signal in SIGNALS:
        tables = NO_PROGRESS | {"update": {"kind": kind}, "signal": {"kind": signal}}
        if signal in OUTER_OPTIMIZERS[kind].signals:
            assert isinstance(compose("averaging", tables).update, OUTER_OPTIMIZERS[kind])
        else:
            with pytest.raises(UnknownOption, match=f"update '{kind}' does not accept signal '{signal}'"):
                compose("averaging", tables)


def test_an_option_may_change_over_the_rounds() -> None:
    method = compose(
        "sparseloco", {"codec": {"kind": [constant("int8", 9), "topk"], "k": curve(256, 64, 20, "exponential")}}
    )
    assert method.breakpoints == (0, 8, 9, 20)
    assert method.at_round(8).codec == BlockInt8(), "options of the other kind are left out"
    assert method.at_round(20).codec == ChunkTopK(k=64)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"signal": {"kind": [constant("pseudo-gradient", 5), "gradient"]}}, "signal.kind = .* must not change"),
        ({"topology": {"kind": [constant("gather", 5), "butterfly"]}}, "topology.kind = .* must not change"),
        ({"update": {"kind": [constant("sgd", 5), "nesterov"]}}, "update.kind = .* must not change"),
        ({"adoption": {"kind": "mix", "alpha": curve(0, 1, 5)}}, "adoption.alpha = .* must not change"),
        ({"update": {"momentum": curve(0.5, 1.5, 5)}}, "update.momentum = 1.5: must be less than 1"),
        ({"codec": {"kind": [constant("int8", 5), "in4"]}}, "did you mean 'int4'"),
        ({"schedule": {"inner_steps": [constant(1, 50), 1.5]}}, "schedule.inner_steps = 1.5"),
        ({"schedule": {"inner_steps": {"start": 10, "end": 30}}}, "schedule.inner_steps: rounds is missing; write {"),
        ({"update": {"momentum": curve(0, 0.9, 5, "exponential")}}, "update.momentum: an exponential curve takes"),
        ({"schedule": {"inner_steps": "10 -> 30"}}, "schedule.inner_steps = '10 -> 30': .* is a table; write { start"),
        ({"update": {"momentum": " 0.5=>0.9"}}, "update.momentum = ' 0.5=>0.9': .* is a table; write { start"),
        ({"adoption": {"kind": "mix", "alpha": "0 -> 1"}}, "adoption.alpha = '0 -> 1': must be a number$"),
    ],
    ids=str,
)
def test_invalid_schedule_is_refused_before_the_run(overrides: Tables, text: str) -> None:
    with pytest.raises(UnknownOption, match=text) as caught:
        compose("diloco", overrides)
    assert "\n" not in str(caught.value)


def test_no_two_codecs_share_a_number() -> None:
    assert len({codec.number for codec in CODECS.values()}) == len(CODECS)


def test_unknown_recipe_suggests_the_nearest_name() -> None:
    with pytest.raises(UnknownRecipe, match="did you mean 'diloco'.*sparseloco"):
        compose("diloko")
    with pytest.raises(UnknownRecipe, match="known: diloco, muloco, sparseloco"):
        compose("zzz")


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"codek": {}}, "no component 'codek'; did you mean 'codec'"),
        ({"codec": {"kind": "in8"}}, "did you mean 'int8'.*Known: none, fp16, .*topk"),
        ({"codec": {"kind": 8}}, "codec.kind = 8"),
        ({"codec": {"k": 3}}, "codec 'int8' has no option 'k'"),
        ({"codec": {"blok": 3}}, "did you mean 'block'"),
        ({"codec": {"number": 3}}, "has no option 'number'"),
        ({"codec": {"block": 8}}, "codec.block = 8: must be at least 16"),
        ({"codec": {"block": True}}, "codec.block = True: must be a whole number"),
        ({"codec": {"block": 32.5}}, "codec.block = 32.5"),
        ({"codec": {"kind": "topk", "k": 5000}}, "k must be at most 4096"),
        ({"codec": {"kind": "topk", "bits": 4}}, "codec.bits = 4: must be at most 3"),
        ({"codec": {"kind": "e3m0", "rounding": "up"}}, "must be 'nearest' or 'stochastic'"),
        ({"codec": {"kind": "dct-topk", "dimensions": 3}}, "must be 1 or 2"),
        ({"codec": {"kind": "subset", "density": 0.0}}, "codec.density = 0.0"),
        ({"codec": {"kind": "int4", "block": 100}}, "codec.block = 100: must be a multiple of 8"),
        ({"aggregate": {"kind": "trimmed"}}, "did you mean 'trimmed-mean'"),
        ({"aggregate": {"kind": "krum", "liars": 0.5}}, "aggregate.liars = 0.5: must be less than 0.5"),
        ({"schedule": {"inner_steps": 0}}, "schedule.inner_steps = 0"),
        ({"schedule": {"ahead": "yes"}}, "schedule.ahead = 'yes': must be a whole number"),
        ({"schedule": {"delay": 1}}, "schedule: delay must not be above ahead"),
        ({"schedule": {"overlap": True}}, "'every-steps' has no option 'overlap'"),
        ({"aggregate": {"weights": "tokns"}}, "must be 'tokens' or 'equal'"),
        ({"update": {"momentum": 1.0}}, "update.momentum = 1.0: must be less than 1"),
        ({"update": {"learning_rate": float("nan")}}, "update.learning_rate = nan"),
        ({"update": {"learning_rate": float("inf")}}, "update.learning_rate = inf"),
        ({"topology": {"kind": "ring"}}, "topology.kind = 'ring' is not known; known: butterfly, gather"),
        ({"feedback": {"decay": 0.0}}, "feedback.decay = 0.0"),
    ],
    ids=str,
)
def test_invalid_options_are_refused_in_one_line_with_the_allowed_values(
    overrides: Mapping[str, Mapping[str, Scalar]], text: str
) -> None:
    with pytest.raises(UnknownOption, match=text) as caught:
        compose("diloco", overrides)
    assert "\n" not in str(caught.value)


def test_collision_between_breakpoints_of_two_schedules_is_found_before_the_run() -> None:
    with pytest.raises(UnknownOption, match="delay must not be above ahead"):
        compose("diloco", {"schedule": {"ahead": curve(30, 0, 10), "delay": curve(30, 0, 10, "cosine")}})
    compose("diloco", {"schedule": {"ahead": curve(30, 0, 10), "delay": curve(15, 0, 10)}})


def test_option_of_either_kind_is_accepted_and_of_neither_refused() -> None:
    with pytest.raises(UnknownOption, match="has no option 'kk'"):
        compose("sparseloco", {"codec": {"kind": [constant("int8", 5), "topk"], "kk": 3}})
    method = compose("sparseloco", {"codec": {"kind": [constant("int8", 5), "topk"], "k": 32, "block": 512}})
    assert (method.codec.kind, method.at_round(5).codec.kind) == ("int8", "topk")
