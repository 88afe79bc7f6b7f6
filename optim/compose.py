"""Compose methods: the registry of components, how a recipe becomes components, and which of them fit together.

`extend_registry` adds components of a researcher's own: the classes of a module that derive from one of BASES, have a
`kind` and are complete.

With little memory a peer keeps 8-bit moments, and vectors that only rounds use outside of main memory. Both concern one
peer alone: its contributions have the same form as those of others, so both kinds of peers take part in one run.
"""

import dataclasses
import difflib
import functools
import inspect
import types
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from optim.aggregation.base import AggregationRule
from optim.aggregation.edit_penalty import EditPenalty
from optim.aggregation.filtered import Filtered
from optim.aggregation.mean import Mean, SenderMean
from optim.aggregation.robust import CentredClip, CoordinateMedian, Krum, TrimmedMean
from optim.codecs.base import SAMPLE_SIZE, Codec
from optim.codecs.dct_topk import DctTopK
from optim.codecs.e2m1 import BlockE2M1
from optim.codecs.e3m0 import BlockE3M0
from optim.codecs.floats import BFloat16, Float16, Uncompressed
from optim.codecs.int_blocks import BlockInt4, BlockInt8
from optim.codecs.lloyd_max import BlockLloydMax
from optim.codecs.low_rank import LowRank
from optim.codecs.random_projection import RandomProjection
from optim.codecs.sign import BlockSign
from optim.codecs.subset import RandomSubset
from optim.codecs.topk import ChunkTopK
from optim.compatibility import check_compatibility, check_defence
from optim.errors import OptimError, UnknownOption, UnknownRecipe, plain_words
from optim.feedback import ErrorFeedback, Feedback, NoFeedback
from optim.inner.adamw import AccumulatingAdamW, AdamW, PrimalAveraging, QuasiHyperbolic
from optim.inner.base import InnerUpdateRule
from optim.inner.delay_compensation import AdaptiveBraking, SpikeCompensation, WeightPrediction
from optim.inner.eight_bit import EightBitAdamW
from optim.inner.gradient_accumulation import GradientAccumulator, LookaheadAccumulator
from optim.inner.growing_batch import GrowingBatch
from optim.inner.muon import Muon
from optim.merge_policy import Interpolate, MergePolicy, RebaseOnAnchor
from optim.method import Method
from optim.options import OptionValue, Scalar
from optim.outer import (
    Adam,
    DelayedNesterov,
    FrozenAdam,
    Gossip,
    GossipWeights,
    HeavyBall,
    Nesterov,
    OuterOptimizer,
    Replace,
    Sgd,
    Sign,
    StalenessPenalised,
)
from optim.recipes import RECIPES, OptionTable, OptionTables, Recipe
from optim.schedules.exchange_schedule import EverySteps, Schedule
from optim.schedules.option_schedules import BitBudget, OptionSchedule, read_bit_budget, read_option
from optim.signals import (
    Gradient,
    Momentum,
    PseudoGradient,
    PseudoGradientAndAnchor,
    Signal,
    Weights,
    WeightsAndMoments,
)
from optim.topologies import TOPOLOGIES

Component = TypeVar("Component")
ReadOptions = Mapping[str, Scalar | OptionSchedule]  # of one component

_INNER_RULES: Final[tuple[type[InnerUpdateRule], ...]] = (
    *(AdamW, EightBitAdamW, Muon, QuasiHyperbolic, AccumulatingAdamW, PrimalAveraging, GrowingBatch),
    *(GradientAccumulator, LookaheadAccumulator),
    *(AdaptiveBraking, SpikeCompensation, WeightPrediction),
)
INNER_RULES: Final[Mapping[str, type[InnerUpdateRule]]] = {inner.kind: inner for inner in _INNER_RULES}
_SIGNALS: Final[tuple[type[Signal], ...]] = (
    *(PseudoGradient, Gradient, Momentum, WeightsAndMoments, Weights, PseudoGradientAndAnchor),
)
SIGNALS: Final[Mapping[str, type[Signal]]] = {signal.kind: signal for signal in _SIGNALS}
SCHEDULES: Final[Mapping[str, type[Schedule]]] = {"every-steps": EverySteps}
_CODECS: Final[tuple[type[Codec], ...]] = (
    *(Uncompressed, Float16, BFloat16, BlockInt8, BlockInt4, BlockE3M0, BlockE2M1, BlockLloydMax, BlockSign),
    *(ChunkTopK, DctTopK, RandomSubset, LowRank, RandomProjection),
)
CODECS: Final[Mapping[str, type[Codec]]] = {codec.kind: codec for codec in _CODECS}
FEEDBACKS: Final[Mapping[str, type[Feedback]]] = {"none": NoFeedback, "error": ErrorFeedback}
_AGGREGATION_RULES: Final[tuple[type[AggregationRule], ...]] = (
    *(Mean, SenderMean, Filtered, TrimmedMean, CoordinateMedian, Krum, CentredClip, EditPenalty),
)
AGGREGATION_RULES: Final[Mapping[str, type[AggregationRule]]] = {
    aggregate.kind: aggregate for aggregate in _AGGREGATION_RULES
}
_OUTER_OPTIMIZERS: Final[tuple[type[OuterOptimizer], ...]] = (
    *(Nesterov, Sgd, HeavyBall, DelayedNesterov, StalenessPenalised, Sign, Adam, FrozenAdam),
    *(Gossip, GossipWeights, Replace),
)
OUTER_OPTIMIZERS: Final[Mapping[str, type[OuterOptimizer]]] = {update.kind: update for update in _OUTER_OPTIMIZERS}
MERGE_POLICIES: Final[Mapping[str, type[MergePolicy]]] = {"carry": RebaseOnAnchor, "mix": Interpolate}
REGISTRY: Final[Mapping[str, Mapping[str, type[Any]]]] = types.MappingProxyType(
    {
        "inner": INNER_RULES,
        "signal": SIGNALS,
        "schedule": SCHEDULES,
        "codec": CODECS,
        "feedback": FEEDBACKS,
        "topology": TOPOLOGIES,
        "aggregate": AGGREGATION_RULES,
        "update": OUTER_OPTIMIZERS,
        "adoption": MERGE_POLICIES,
    }
)
Registry = Mapping[str, Mapping[str, type[Any]]]  # the kinds of each component
COMPONENTS: Final = tuple(REGISTRY)
SCHEDULABLE: Final = (
    "schedule",
    "codec",
    "feedback",
    "aggregate",
    "update",
)  # components whose options may change over a run
NO_OVERRIDES: Final[OptionTables] = types.MappingProxyType({})


def compose(recipe: str, overrides: OptionTables = NO_OVERRIDES, registry: Registry = REGISTRY) -> Method:
    """Return the method of a recipe, with some options changed: {"codec": {"k": 128}, "update": {"kind": "sgd"}}.

    A table with a different `kind` replaces the recipe's component; options that it does not set have that kind's
    defaults. `registry` has the kinds to choose from (`extend_registry`).

    Raises:
        UnknownRecipe: no recipe has that name; one line that suggests the nearest one.
        UnknownOption: one line that suggests the nearest known name or lists the allowed values.
    """
    if recipe not in RECIPES:
        raise UnknownRecipe(f"no recipe is called {recipe!r}; {_suggest_name(recipe, RECIPES)}")
    for component in overrides:
        if component not in COMPONENTS:
            raise UnknownOption(f"a method has no component {component!r}; {_suggest_name(component, COMPONENTS)}")
    recipe_row = RECIPES[recipe]
    options = _read_tables(
        {
            component: _merge_tables(recipe_row.tables[component], overrides.get(component, {}))
            for component in COMPONENTS
        },
        registry,
    )
    build = functools.partial(_build_method, recipe_row, options, registry)
    breakpoints = tuple(sorted({0, *_breakpoints_of(options)}))
    for number in _rounds_to_check(breakpoints):
        build(number)  # find every fault now
    if len(breakpoints) == 1:
        return build(0)
    in_round = functools.lru_cache(maxsize=MAX_CACHED_METHODS)(build)
    return dataclasses.replace(in_round(0), breakpoints=breakpoints, build_for_round=in_round)


MAX_CACHED_METHODS = 64
MAX_CHECKED_ROUNDS = 4096


def _rounds_to_check(breakpoints: tuple[int, ...]) -> Iterable[int]:
    """Return all rounds, if not too many: options that bound each other may collide between two breakpoints."""
    return (*breakpoints, *range(breakpoints[-1])) if breakpoints[-1] < MAX_CHECKED_ROUNDS else breakpoints


def _build_method(recipe: Recipe, options: Mapping[str, ReadOptions], registry: Registry, round_number: int) -> Method:
    components = {
        component: _build_component(component, registry[component], options[component], round_number)
        for component in COMPONENTS
    }
    method = Method(name=recipe.name, paper=recipe.paper, **components)
    check_compatibility(method, round_number)
    check_defence(method, recipe.tables["aggregate"])
    return method


def _read_tables(tables: OptionTables, registry: Registry) -> Mapping[str, ReadOptions]:
    """Read every option's schedule; a bit budget becomes the schedule that it pays for."""
    budget = read_bit_budget(tables["schedule"].get("inner_steps", 0))
    if budget is None:
        return {component: _read_table(component, table) for component, table in tables.items()}
    unspent = {**tables, "schedule": {**tables["schedule"], "inner_steps": 1}}
    options = {component: _read_table(component, table) for component, table in unspent.items()}
    return {**options, "schedule": {**options["schedule"], "inner_steps": _spend(budget, options, registry)}}


def _read_table(component: str, table: OptionTable) -> ReadOptions:
    return {option: _read_option(component, option, value) for option, value in table.items()}


def _read_option(component: str, option: str, value: OptionValue) -> Scalar | OptionSchedule:
    if component in SCHEDULABLE and (option != "kind" or component == "codec"):
        return read_option(f"{component}.{option}", value)
    if not isinstance(value, Scalar):
        raise UnknownOption(f"{component}.{option} = {value!r} must not change over the rounds; write a plain value")
    return value


def _spend(budget: BitBudget, options: Mapping[str, ReadOptions], registry: Registry) -> int | OptionSchedule:
    if any(isinstance(value, OptionSchedule) for value in options["codec"].values()):
        raise UnknownOption("schedule.inner_steps: a budget needs a codec that does not change over the rounds")
    codec = _build_component("codec", registry["codec"], options["codec"], 0)
    vectors = _build_component("signal", registry["signal"], options["signal"], 0).vector_count
    fragments = options["schedule"].get("fragments", 1)
    bits = codec.bits_per_parameter(SAMPLE_SIZE) * vectors
    return budget.inner_steps(bits, fragments if isinstance(fragments, int) else 1)


def _merge_tables(default: OptionTable, override: OptionTable) -> OptionTable:
    kind = override.get("kind", default["kind"])
    if kind != default["kind"]:
        return override
    return {**default, **override}


def _breakpoints_of(options: Mapping[str, ReadOptions]) -> Iterator[int]:
    for table in options.values():
        for value in table.values():
            if isinstance(value, OptionSchedule):
                yield from value.breakpoints


def _build_component(
    component: str, kinds: Mapping[str, type[Component]], table: ReadOptions, round_number: int
) -> Component:
    options = {option: _value_in_round(value, round_number) for option, value in table.items()}
    kind = options.pop("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise UnknownOption(f"{component}.kind = {kind!r} is not known; {_suggest_name(str(kind), kinds)}")
    fields = _option_names(kinds[kind])
    known = {field for other in _kinds_ever_used(table["kind"]) & kinds.keys() for field in _option_names(kinds[other])}
    for option in options:
        if option not in known:
            raise UnknownOption(
                f"{component} {kind!r} has no option {option!r}; {_suggest_name(option, [*fields, 'kind'])}"
            )
    try:
        return kinds[kind](**{option: value for option, value in options.items() if option in fields})
    except ValidationError as error:
        raise UnknownOption(_describe_error(component, error)) from error


def _option_names(kind: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _kinds_ever_used(kind: Scalar | OptionSchedule) -> set[str]:
    """Return every kind: an option may belong to the kind before a change, or to the one after it."""
    return {str(one) for one in kind.constants} if isinstance(kind, OptionSchedule) else {str(kind)}


def _value_in_round(value: Scalar | OptionSchedule, round_number: int) -> Scalar:
    return value.at_round(round_number) if isinstance(value, OptionSchedule) else value


def _describe_error(component: str, error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    option = ".".join((component, *map(str, first["loc"])))
    message = plain_words(first["msg"])
    return f"{option} = {first['input']!r}: {message}" if first["loc"] else f"{component}: {message}"


def _suggest_name(name: str, known: Any) -> str:
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    names = ", ".join(known)
    return f"did you mean {matches[0]!r}? Known: {names}" if matches else f"known: {names}"


def with_small_memory(method: Method) -> Method:
    """Return a method that does the same for the others, with less memory of this peer.

    Raises:
        UnknownOption: its inner optimizer keeps vectors that have no form of 8 bits, or peers exchange them.
    """
    inner = method.inner
    if exchanged := [name for name in method.signal.shared_names if name in inner.vectors]:
        raise UnknownOption(
            f"recipe {method.name} exchanges {exchanged[0]!r} of its inner optimizer, which 8 bits do not hold; "
            'leave memory = "small" out, or choose a recipe that exchanges weights, such as frugal or diloco'
        )
    if isinstance(inner, AdamW):
        return method.with_parts(inner=EightBitAdamW(), has_small_memory=True)
    if not isinstance(inner, EightBitAdamW) and set(inner.vectors) - {*method.signal.consumed_names}:
        raise UnknownOption(
            f"inner optimizer {inner.kind!r} of recipe {method.name} has no form of 8 bits; "
            'leave memory = "small" out, or choose inner = { kind = "adamw" }'
        )
    return method.with_parts(has_small_memory=True)


BASES: Final[Mapping[str, type[Any]]] = types.MappingProxyType(
    {
        "inner": InnerUpdateRule,
        "schedule": EverySteps,
        "codec": Codec,
        "aggregate": AggregationRule,
        "update": OuterOptimizer,
    }
)
OWN_NUMBERS: Final = range(128, 256)  # of codecs; ours are below


def extend_registry(modules: Iterable[ModuleType]) -> Registry:
    """Return the kinds of all components, with those of the modules.

    Raises:
        OptimError: a component cannot be used; the text says what to change.
    """
    found: dict[str, dict[str, type[Any]]] = {part: dict(kinds) for part, kinds in REGISTRY.items()}
    for module in modules:
        components = list(find_components(module))
        if not components:
            raise OptimError(f"{module.__name__} defines no component; derive a class from {_base_names()}")
        for part, component in components:
            if fault := declaration_fault(part, component):
                raise OptimError(f"{module.__name__}.{component.__name__}: {fault}")
            if component.kind in found[part]:
                raise OptimError(f"there are two components {part}.kind = {component.kind!r}; rename yours")
            found[part][component.kind] = component
    _require_different_numbers(found["codec"].values())
    return found


def find_components(module: ModuleType) -> Iterator[tuple[str, type[Any]]]:
    """Yield part and class of each component that a module defines."""
    for value in vars(module).values():
        if inspect.isclass(value) and value.__module__ == module.__name__ and not inspect.isabstract(value):
            part = part_of(value)
            if part is not None and "kind" in vars(value):
                yield part, value


def part_of(component: type[Any]) -> str | None:
    """Return the part of a method that a class can be; None if it is not a component."""
    return next((part for part, base in BASES.items() if issubclass(component, base)), None)


def declaration_fault(part: str, component: type[Any]) -> str:
    """Return the fault in the declaration of a class; empty if a method can be composed of it."""
    kind = getattr(component, "kind", None)
    if not isinstance(kind, str) or not kind:
        return 'it needs a name: kind: ClassVar[str] = "..."'
    if not dataclasses.is_dataclass(component) or not component.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return "decorate it with @dataclass(frozen=True, kw_only=True, config=STRICT) of pydantic.dataclasses"
    try:
        component()
    except (TypeError, ValueError) as error:
        return f"each option needs a default that it allows: {str(error).splitlines()[0]}"
    if part != "codec":
        return ""
    if getattr(component, "number", None) not in OWN_NUMBERS:
        return f"number: ClassVar[int] must be one from {OWN_NUMBERS[0]} to {OWN_NUMBERS[-1]}; it begins each payload"
    return "" if getattr(component, "version", None) in range(256) else "it needs version: ClassVar[int] = 1"


def _require_different_numbers(codecs: Iterable[type[Codec]]) -> None:
    by_number: dict[int, str] = {}
    for codec in codecs:
        other = by_number.setdefault(codec.number, codec.kind)
        if other != codec.kind:
            raise OptimError(f"codecs {other!r} and {codec.kind!r} have the same number {codec.number}; change one")


def _base_names() -> str:
    return ", ".join(base.__name__ for base in BASES.values())
