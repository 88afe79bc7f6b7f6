"""From a recipe's name to a method: every kind of part there is, and how a row of the table becomes parts."""

import dataclasses
import difflib
import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from optim.adoption import Adoption, Carry, Mix
from optim.aggregate import Aggregate, Mean, SenderMean
from optim.budget import budget
from optim.codecs.codec import SAMPLE, Codec
from optim.codecs.cosine_topk import CosineTopK
from optim.codecs.dense import BrainFloat, HalfPrecision, Uncompressed
from optim.codecs.direction import Direction
from optim.codecs.integers import BlockInt4, BlockInt8
from optim.codecs.low_rank import LowRank
from optim.codecs.powers import PowersOfTwo
from optim.codecs.signs import BlockSign
from optim.codecs.subset import RandomSubset
from optim.codecs.topk import ChunkTopK
from optim.compatibility import check
from optim.errors import UnknownOption, UnknownRecipe
from optim.feedback import ErrorFeedback, Feedback, NoFeedback
from optim.inner.accumulating import AccumulatingAdamW
from optim.inner.adamw import AdamW
from optim.inner.gathering import Gathering, GatheringAhead
from optim.inner.growing_batch import GrowingBatch
from optim.inner.inner import Inner
from optim.inner.late_gradients import AdaptiveBraking, SpikeCompensation, WeightPrediction
from optim.inner.quasi_hyperbolic import QuasiHyperbolic
from optim.method import Method
from optim.parts import Scalar
from optim.penalty import Penalty
from optim.ramps import is_endless, ramp
from optim.robust import CentredClip, CoordinateMedian, Krum, TrimmedMean
from optim.rows import RECIPES, Recipe, Table, Tables
from optim.schedules import EverySteps, Schedule
from optim.signals import Gradient, InnerState, Momentum, ProgressAndAnchor, PseudoGradient, Signal, Weights
from optim.topologies import Butterfly, Gather, Groups, Topology
from optim.updates import (
    Adam,
    DelayedNesterov,
    FrozenAdam,
    Gossip,
    GossipWeights,
    HeavyBall,
    Nesterov,
    Replace,
    Sgd,
    Sign,
    StalenessPenalised,
    Update,
)

Part = TypeVar("Part")

_INNERS: Final[tuple[type[Inner], ...]] = (
    *(AdamW, QuasiHyperbolic, AccumulatingAdamW, GrowingBatch, Gathering, GatheringAhead),
    *(AdaptiveBraking, SpikeCompensation, WeightPrediction),
)
INNERS: Final[Mapping[str, type[Inner]]] = {inner.kind: inner for inner in _INNERS}
_SIGNALS: Final[tuple[type[Signal], ...]] = (
    *(PseudoGradient, Gradient, Momentum, InnerState, Weights, ProgressAndAnchor),
)
SIGNALS: Final[Mapping[str, type[Signal]]] = {signal.kind: signal for signal in _SIGNALS}
SCHEDULES: Final[Mapping[str, type[Schedule]]] = {"every-steps": EverySteps}
_CODECS: Final[tuple[type[Codec], ...]] = (
    *(Uncompressed, HalfPrecision, BrainFloat, BlockInt8, BlockInt4, PowersOfTwo, BlockSign),
    *(ChunkTopK, CosineTopK, RandomSubset, LowRank, Direction),
)
CODECS: Final[Mapping[str, type[Codec]]] = {codec.kind: codec for codec in _CODECS}
FEEDBACKS: Final[Mapping[str, type[Feedback]]] = {"none": NoFeedback, "error": ErrorFeedback}
TOPOLOGIES: Final[Mapping[str, type[Topology]]] = {"butterfly": Butterfly, "gather": Gather, "groups": Groups}
_AGGREGATES: Final[tuple[type[Aggregate], ...]] = (
    *(Mean, SenderMean, TrimmedMean, CoordinateMedian, Krum, CentredClip, Penalty),
)
AGGREGATES: Final[Mapping[str, type[Aggregate]]] = {aggregate.kind: aggregate for aggregate in _AGGREGATES}
_UPDATES: Final[tuple[type[Update], ...]] = (
    *(Nesterov, Sgd, HeavyBall, DelayedNesterov, StalenessPenalised, Sign, Adam, FrozenAdam),
    *(Gossip, GossipWeights, Replace),
)
UPDATES: Final[Mapping[str, type[Update]]] = {update.kind: update for update in _UPDATES}
ADOPTIONS: Final[Mapping[str, type[Adoption]]] = {"carry": Carry, "mix": Mix}
KINDS: Final[Mapping[str, Mapping[str, type[Any]]]] = types.MappingProxyType(
    {
        "inner": INNERS,
        "signal": SIGNALS,
        "schedule": SCHEDULES,
        "codec": CODECS,
        "feedback": FEEDBACKS,
        "topology": TOPOLOGIES,
        "aggregate": AGGREGATES,
        "update": UPDATES,
        "adoption": ADOPTIONS,
    }
)
PARTS: Final = tuple(KINDS)
CHANGING: Final = ("schedule", "codec", "feedback", "aggregate", "update")  # parts whose options may change over a run
NOTHING: Final[Tables] = types.MappingProxyType({})


def compose(recipe: str, overrides: Tables = NOTHING) -> Method:
    """The recipe with some parts' options changed: {"codec": {"k": 128}, "update": {"kind": "sgd"}}.

    A table with another `kind` replaces the recipe's part; the options it does not give are that kind's defaults.
    UnknownRecipe or UnknownOption, each one line that names the nearest known name or the allowed values.
    """
    if recipe not in RECIPES:
        raise UnknownRecipe(f"no recipe is called {recipe!r}; {_hint(recipe, RECIPES)}")
    for part in overrides:
        if part not in PARTS:
            raise UnknownOption(f"a method has no part {part!r}; {_hint(part, PARTS)}")
    row = RECIPES[recipe]
    tables = _spending({part: _merged(row.tables[part], overrides.get(part, {})) for part in PARTS})
    knots = tuple(sorted({0, *_knots(tables)}))
    for number in _tried(knots):
        _compose(row, tables, number)  # every fault is found now
    if len(knots) == 1:
        return _compose(row, tables, 0)
    in_round = functools.lru_cache(maxsize=KEPT_METHODS)(functools.partial(_compose, row, tables))
    return dataclasses.replace(in_round(0), knots=knots, in_round=in_round)


KEPT_METHODS = 64
MOST_TRIED = 4096


def _tried(knots: tuple[int, ...]) -> Iterable[int]:
    """Options that bound one another may collide between the turns of their courses: all rounds, if not too many."""
    return (*knots, *range(knots[-1])) if knots[-1] < MOST_TRIED else knots


def _compose(row: Recipe, tables: Tables, round_number: int) -> Method:
    parts = {part: _build(part, KINDS[part], tables[part], round_number) for part in PARTS}
    method = Method(name=row.name, paper=row.paper, **parts)
    check(method, round_number)
    return method


def _spending(tables: Tables) -> Tables:
    """With a course for schedule.inner_steps where a budget stands there."""
    schedule, codec = tables["schedule"], tables["codec"]
    granted = budget(schedule.get("inner_steps", 0))
    if granted is None:
        return tables
    if any(ramp(value) for value in codec.values()):
        raise UnknownOption("schedule.inner_steps: a budget takes a codec that does not change over the rounds")
    built = _build("codec", CODECS, codec, 0)
    bits = built.bits_per_parameter(SAMPLE) * _build("signal", SIGNALS, tables["signal"], 0).width
    fragments = schedule.get("fragments", 1)
    course = granted.course(bits, fragments if isinstance(fragments, int) else 1)
    return {**tables, "schedule": {**schedule, "inner_steps": course}}


def _merged(default: Table, override: Table) -> Table:
    kind = override.get("kind", default["kind"])
    if kind != default["kind"]:
        return override
    return {**default, **override}


def _knots(tables: Tables) -> Iterator[int]:
    for part, table in tables.items():
        for option, value in table.items():
            if course := ramp(value):
                if part not in CHANGING or (option == "kind" and part != "codec"):
                    raise UnknownOption(f"{part}.{option} = {value!r} must not change over the rounds")
                yield from course.knots


def _build(part: str, kinds: Mapping[str, type[Part]], table: Table, round_number: int) -> Part:
    options = {option: _in_round(value, round_number) for option, value in table.items()}
    kind = options.pop("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise UnknownOption(f"{part}.kind = {kind!r} is not known; {_hint(str(kind), kinds)}")
    fields = _options(kinds[kind])
    known = {field for other in _kinds_over_time(table["kind"]) & kinds.keys() for field in _options(kinds[other])}
    for option in options:
        if option not in known:
            raise UnknownOption(f"{part} {kind!r} has no option {option!r}; {_hint(option, [*fields, 'kind'])}")
    try:
        return kinds[kind](**{option: value for option, value in options.items() if option in fields})
    except ValidationError as error:
        raise UnknownOption(_first_fault(part, error)) from error


def _options(kind: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _kinds_over_time(kind: Scalar) -> set[str]:
    """A codec's options may belong to the kind before a turn, or to the one after it."""
    course = ramp(kind)
    return course.words if course else {str(kind)}


def _in_round(value: Scalar, round_number: int) -> Scalar:
    course = ramp(value)
    return course.at(round_number) if course else value


def _first_fault(part: str, error: ValidationError) -> str:
    fault = error.errors(include_url=False)[0]
    place = ".".join((part, *map(str, fault["loc"])))
    message = fault["msg"].removeprefix("Value error, ").removeprefix("Input ")
    given = fault["input"]
    hint = f'; write "{given.strip()} over ROUNDS"' if part in CHANGING and is_endless(given) else ""
    return f"{place} = {given!r}: {message}{hint}" if fault["loc"] else f"{part}: {message}"


def _hint(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return (f"did you mean {near[0]!r}? " if near else "") + f"Known: {', '.join(known)}"
