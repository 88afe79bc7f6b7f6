"""The table of methods: compositions of components by name, with the options that differ from their defaults."""

import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from optim.options import OptionValue, Scalar

OptionTable = Mapping[str, OptionValue]
OptionTables = Mapping[str, OptionTable]


@dataclass(frozen=True)
class Recipe:
    """A row of the table.

    `tables` gives, for each component, its kind and the options that differ from the kind's defaults.
    """

    name: str
    paper: str
    tables: OptionTables


# The rounds that a late contribution missed have already included its steep directions, and momentum repeats them:
# therefore a contribution that is one round late counts an eighth (see docs/reference/recipes.md).
LATE_STALENESS: Final = 3.0
DEFAULT_TABLES: Final[OptionTables] = types.MappingProxyType(
    {
        "inner": {"kind": "adamw"},
        "signal": {"kind": "pseudo-gradient"},
        "codec": {"kind": "fp16"},
        "feedback": {"kind": "none"},
        "topology": {"kind": "butterfly"},
        "aggregate": {"kind": "mean", "staleness": LATE_STALENESS},
        "update": {"kind": "nesterov", "learning_rate": 0.7, "momentum": 0.9, "shorten": True},
        "adoption": {"kind": "carry"},
    }
)
# Peers train on from their residual; otherwise sending it later would correct the same errors twice.
INT8: Final[Mapping[str, OptionTable]] = types.MappingProxyType(
    {
        "codec": {"kind": "int8"},
        "feedback": {"kind": "error"},
        "adoption": {"kind": "carry", "unsent": 1.0},
    }
)
PLAIN_AVERAGING: Final[Mapping[str, OptionTable]] = types.MappingProxyType(
    {"update": {"kind": "sgd", "learning_rate": 1.0}}
)
EQUAL_WEIGHTS: Final[OptionTable] = types.MappingProxyType({"kind": "mean", "weights": "equal"})
WEIGHTED_BY_AGE: Final[OptionTable] = types.MappingProxyType({**EQUAL_WEIGHTS, "staleness": 0.5, "over": "members"})
# Every step's gradient is exchanged, and only the outer step moves the weights.
EVERY_GRADIENT: Final[Mapping[str, OptionTable]] = types.MappingProxyType(
    {
        "inner": {"kind": "gathering"},
        "signal": {"kind": "gradient"},
        "schedule": {"kind": "every-steps", "inner_steps": 1},
    }
)
SIGN_OF_MOMENTUM: Final[Mapping[str, OptionTable]] = types.MappingProxyType(
    {
        **EVERY_GRADIENT,
        "feedback": {"kind": "error", "decay": 0.999},
        "update": {"kind": "sign", "learning_rate": 0.001, "weight_decay": 0.1},
    }
)
# Only a sixteenth of the weights moves in a step, so the rate is ten times larger.
SUBSET: Final[Mapping[str, OptionTable]] = types.MappingProxyType(
    {**SIGN_OF_MOMENTUM, "update": {"kind": "sign", "learning_rate": 0.01, "weight_decay": 0.1}}
)
SPARSE_TOPK: Final[Mapping[str, OptionTable]] = types.MappingProxyType(
    {
        "codec": {"kind": "topk", "k": 64},
        "feedback": {"kind": "error", "decay": 0.95},
        "topology": {"kind": "gather"},
        "aggregate": {"kind": "mean", "clip": True},
        "update": {"kind": "sgd", "learning_rate": 1.0},
    }
)


def _every_steps(inner_steps: OptionValue, **options: OptionValue) -> OptionTable:
    return {"kind": "every-steps", "inner_steps": inner_steps, **options}


def _overlapped(inner_steps: OptionValue) -> OptionTable:
    """Return a schedule whose results are applied a whole round late, when the next contribution is due."""
    return _every_steps(inner_steps, ahead=inner_steps, delay=inner_steps)


def _constant(value: Scalar, rounds: int) -> Mapping[str, Scalar]:
    return {"value": value, "rounds": rounds}


def _curve(start: float, end: float, rounds: int, curve: str = "linear") -> Mapping[str, Scalar]:
    return {"start": start, "end": end, "rounds": rounds, "curve": curve}


def _make_recipe(name: str, paper: str, common: OptionTables = DEFAULT_TABLES, **tables: OptionTable) -> Recipe:
    return Recipe(name, paper, types.MappingProxyType({**DEFAULT_TABLES, **common, **tables}))


SYNCHRONOUS: Final = (
    _make_recipe("diloco", "arXiv 2311.08105", INT8, schedule=_every_steps(100)),
    _make_recipe(
        "muloco",
        "arXiv 2505.23725",
        INT8,
        inner={"kind": "muon"},
        schedule=_every_steps(30),
        update={"kind": "nesterov", "learning_rate": 0.9, "momentum": 0.8, "shorten": True},
    ),
    _make_recipe("sparseloco", "arXiv 2508.15706", SPARSE_TOPK, schedule=_every_steps(30)),
    _make_recipe(
        "sparseloco-senders",
        "arXiv 2508.15706 as deployed (2603.08163)",
        SPARSE_TOPK,
        schedule=_every_steps(30),
        aggregate={"kind": "sender-mean", "clip": True},
    ),
    _make_recipe(
        "frugal",
        "arXiv 2603.08163, with our constants",
        SPARSE_TOPK,
        schedule=_every_steps(9, ahead=9),
        codec={"kind": "topk", "k": 64, "bits": 1},
        feedback={"kind": "error", "decay": 0.8},
        aggregate={"kind": "filtered", "over": "senders", "memory": 256},
        adoption={"kind": "carry", "unsent": 0.3},
    ),
    _make_recipe("averaging", "arXiv 1602.05629", {**INT8, **PLAIN_AVERAGING}, schedule=_every_steps(30)),
    _make_recipe("adloco", "arXiv 2508.18182", INT8, schedule=_every_steps(100), inner={"kind": "growing-batch"}),
    _make_recipe(
        "edit",
        "arXiv 2412.07210",
        schedule=_every_steps(128),
        topology={"kind": "gather"},
        aggregate={"kind": "penalty", "statistics": "running"},
        update={"kind": "nesterov", "learning_rate": 0.7, "momentum": 0.8},
    ),
    _make_recipe(
        "local-adam",
        "arXiv 2505.22549 (its baseline)",
        PLAIN_AVERAGING,
        schedule=_every_steps(64),
        signal={"kind": "inner-state", "first_every": 1, "second_every": 1},
        codec={"kind": "none"},
    ),
    _make_recipe(
        "des-loc",
        "arXiv 2505.22549",
        PLAIN_AVERAGING,
        schedule=_every_steps(64),
        signal={"kind": "inner-state", "first_every": 3, "second_every": 6},
        codec={"kind": "none"},
    ),
    _make_recipe(
        "mt-dao",
        "arXiv 2510.05361",
        PLAIN_AVERAGING,
        schedule=_every_steps(32),
        inner={"kind": "quasi-hyperbolic", "beta": 0.999, "weight": 0.9},
        signal={"kind": "inner-state", "first_every": 1, "second_every": 1},
        codec={"kind": "none"},
    ),
)
WARM_STARTED: Final = (
    _make_recipe(
        "diloco-warm",
        "arXiv 2311.08105 with synchronous first rounds",
        INT8,
        schedule=_every_steps([_constant(1, rounds=50), _curve(10, 60, rounds=30, curve="exponential")]),
        update={
            "kind": "nesterov",
            "learning_rate": [_constant(1.0, rounds=50), 0.7],
            "momentum": [_constant(0.0, rounds=50), _curve(0.5, 0.9, rounds=30)],
            "shorten": True,
        },
    ),
    _make_recipe(
        "sparseloco-warm",
        "arXiv 2508.15706 with synchronous, dense first rounds",
        SPARSE_TOPK,
        schedule=_every_steps([_constant(1, rounds=50), _curve(10, 30, rounds=30, curve="exponential")]),
        codec={
            "kind": [_constant("int8", rounds=50), "topk"],
            "k": [_constant(256, rounds=50), _curve(256, 64, rounds=30, curve="exponential")],
        },
    ),
)
OVERLAPPED: Final = (
    _make_recipe(
        "streaming-diloco",
        "arXiv 2501.18512",
        schedule=_every_steps(100, fragments=4, ahead=5, delay=5),
        codec={"kind": "e3m0"},
        adoption={"kind": "mix", "alpha": 0.5},
    ),
    _make_recipe(
        "eager-diloco",
        "arXiv 2502.12996",
        INT8,
        schedule=_overlapped(100),
        # A larger rate would be unstable, because results are a round late.
        update={"kind": "nesterov", "learning_rate": 0.4, "momentum": 0.6, "shorten": True},
        adoption={"kind": "carry", "keep": 0.125},
    ),
    _make_recipe(
        "dilocox",
        "arXiv 2506.21263",
        schedule=_overlapped(_curve(124, 62, rounds=40, curve="exponential")),
        codec={
            "kind": "low-rank",
            "rank": _curve(32, 16, rounds=40, curve="exponential"),
            "values": "int4",
            "energy": 0.95,
        },
        feedback={"kind": "error"},
        topology={"kind": "gather"},
    ),
    _make_recipe(
        "co2",
        "arXiv 2401.16265",
        schedule=_overlapped(48),
        update={"kind": "staleness-penalised", "learning_rate": 1.0, "momentum": 0.5},
        adoption={"kind": "carry", "keep": 0.0},
    ),
)
EVERY_STEP: Final = (
    _make_recipe(
        "data-parallel",
        "arXiv 1711.05101 on the mean gradient",
        EVERY_GRADIENT,
        codec={"kind": "none"},
        update={"kind": "adam"},
    ),
    _make_recipe(
        "backup-workers",
        "arXiv 2004.14696",
        EVERY_GRADIENT,
        schedule=_every_steps(1, quorum=_curve(0.5, 1.0, rounds=500)),
        codec={"kind": "none"},
        aggregate={**EQUAL_WEIGHTS, "staleness": 10.0},
        update={"kind": "adam"},
    ),
    _make_recipe(
        "qsdp",
        "arXiv 2302.02390",
        EVERY_GRADIENT,
        codec={"kind": "int8", "block": 1024, "rounding": "stochastic"},
        update={"kind": "adam"},
    ),
    _make_recipe(
        "one-bit-adam",
        "arXiv 2102.02888",
        EVERY_GRADIENT,
        signal={"kind": "momentum", "beta": 0.9},
        codec={"kind": [_constant("none", rounds=100), "sign"]},
        feedback={"kind": "error"},
        topology={"kind": "gather"},
        update={"kind": "frozen-adam", "warm_rounds": 100, "floor": 0.01},
    ),
    _make_recipe(
        "demo",
        "arXiv 2411.19870",
        SIGN_OF_MOMENTUM,
        codec={"kind": "dct-topk", "k": 32, "bits": 3},
        topology={"kind": "gather"},
    ),
    _make_recipe(
        "distro",
        "arXiv 2411.19870 as deployed",
        SIGN_OF_MOMENTUM,
        inner={"kind": "gathering-ahead", "beta": 0.999, "reach": 0.3},
        schedule=_overlapped(1),
        codec={"kind": "dct-topk", "k": 32, "bits": 1},
        topology={"kind": "gather"},
        aggregate={"kind": "sender-mean"},
    ),
    _make_recipe(
        "detonation-random",
        "arXiv 2502.06728",
        SUBSET,
        codec={"kind": "subset", "density": 0.0625, "values": "fp16"},
    ),
    _make_recipe(
        "detonation-striding",
        "arXiv 2502.06728",
        SUBSET,
        codec={"kind": "subset", "density": 0.0625, "values": "fp16", "selection": "striding"},
    ),
    _make_recipe("detonation-full", "arXiv 2502.06728", SIGN_OF_MOMENTUM),
    _make_recipe(
        "spsa",
        "arXiv 2306.10015",
        EVERY_GRADIENT,
        codec={"kind": "direction"},
        topology={"kind": "gather"},
        aggregate={**EQUAL_WEIGHTS, "clip": True},
        update={"kind": "sgd", "learning_rate": 1e-5},
    ),
)
GROUPS: Final = (
    _make_recipe(
        "noloco",
        "arXiv 2506.10911",
        schedule=_every_steps(50),
        signal={"kind": "progress-and-anchor"},
        topology={"kind": "groups", "size": 2},
        aggregate=EQUAL_WEIGHTS,
        update={"kind": "gossip", "alpha": 0.5, "beta": 0.7, "gamma": 0.7},
    ),
    _make_recipe(
        "noloco-weights",
        "arXiv 2506.10911 with gamma = beta",
        schedule=_every_steps(50),
        signal={"kind": "weights"},
        topology={"kind": "groups", "size": 2},
        aggregate=EQUAL_WEIGHTS,
        update={"kind": "gossip-weights", "alpha": 0.5, "beta": 0.7},
    ),
    _make_recipe(
        "gossip-adam",
        "arXiv 2410.11998",
        inner={"kind": "accumulating-adamw", "every": 4},
        schedule=_overlapped(1),
        signal={"kind": "weights"},
        topology={"kind": "groups", "size": 2, "pattern": "exponential"},
        aggregate=EQUAL_WEIGHTS,
        update={"kind": "replace"},
    ),
)
ASYNCHRONOUS: Final = (
    _make_recipe(
        "a-edit",
        "arXiv 2412.07210",
        schedule=_every_steps(128, ahead=128, quorum=0.5),
        topology={"kind": "gather"},
        aggregate={"kind": "penalty", "statistics": "running", "tokens": 0.5},
        update={"kind": "nesterov", "learning_rate": 0.7, "momentum": 0.8},
    ),
    _make_recipe(
        "fedbuff",
        "arXiv 2106.06639",
        PLAIN_AVERAGING,
        schedule=_every_steps(50, ahead=50, quorum=0.5),
        aggregate=WEIGHTED_BY_AGE,
    ),
    _make_recipe(
        "fedcompass",
        "arXiv 2309.14675",
        schedule=_every_steps(100, least_steps=20, seconds=60.0),
        aggregate=WEIGHTED_BY_AGE,
        update={"kind": "sgd", "learning_rate": 0.9},
    ),
    _make_recipe(
        "anarchic",
        "arXiv 2108.09875",
        schedule=_every_steps(20, ahead=80, quorum=0.25),
        signal={"kind": "pseudo-gradient", "equal_steps": 20},
        aggregate=EQUAL_WEIGHTS,
        update={
            "kind": "sgd",
            "learning_rate": 0.25,
        },  # equal to the quorum, so that each peer moves the anchor by its fraction
    ),
    _make_recipe(
        "delayed-nesterov",
        "arXiv 2401.09135",
        schedule=_every_steps(50, ahead=50, quorum=0.25),
        aggregate=EQUAL_WEIGHTS,
        update={"kind": "delayed-nesterov", "learning_rate": 0.7, "momentum": 0.9, "period": 4},
    ),
    *(
        _make_recipe(kind, paper, {**INT8, **PLAIN_AVERAGING}, schedule=_overlapped(30), inner={"kind": kind})
        for kind, paper in (
            ("adaptive-braking", "arXiv 2007.01397"),
            ("spike-compensation", "arXiv 2003.11666"),
            ("weight-prediction", "arXiv 2003.11666"),
        )
    ),
)
ALL_RECIPES: Final = (*SYNCHRONOUS, *WARM_STARTED, *OVERLAPPED, *EVERY_STEP, *GROUPS, *ASYNCHRONOUS)
RECIPES: Final[Mapping[str, Recipe]] = types.MappingProxyType({row.name: row for row in ALL_RECIPES})
SUMMARIES: Final[Mapping[str, str]] = types.MappingProxyType(
    {
        "frugal": "Signs of the largest 1.6 % of the progress every 9 steps, sent while peers train on.",
        "sparseloco": "The largest 1.6 % of the progress in 2 bits, every 30 steps; the rest is sent later.",
        "sparseloco-senders": "sparseloco, where each value is the mean over its senders, which moves farther.",
        "diloco": "All progress in 8 bits every 100 steps, with outer momentum: strong in long runs.",
        "muloco": "diloco every 30 steps with Muon inside the peers, whose progress agrees better.",
        "averaging": "All progress in 8 bits every 30 steps, averaged: simple, good in short runs.",
        "adloco": "diloco, whose peers take larger batches as gradients become noisier.",
        "edit": "All progress every 128 steps; blocks of unusual progress are left out.",
        "local-adam": "Weights and both moments of Adam every 64 steps, in fp32.",
        "des-loc": "local-adam with half the bytes: the moments are averaged less often.",
        "mt-dao": "Weights, a slow momentum and second moments every 32 steps.",
        "diloco-warm": "diloco after 50 rounds of one step each.",
        "sparseloco-warm": "sparseloco after 50 dense rounds of one step each.",
        "streaming-diloco": "diloco in four fragments, one after the other, while peers train on.",
        "eager-diloco": "diloco, whose rounds travel while peers train on.",
        "dilocox": "Each matrix as two small factors in 4 bits, while peers train on.",
        "co2": "All progress every 48 steps, applied a round late, which hides slow links.",
        "data-parallel": "Every gradient in fp32: the reference, for fast networks.",
        "backup-workers": "data-parallel that does not wait for the slowest peers.",
        "qsdp": "data-parallel with gradients in 8 bits.",
        "one-bit-adam": "data-parallel for 100 steps, then only signs.",
        "demo": "The largest frequencies of the momentum at every step; steps by sign.",
        "distro": "demo in 1 bit, applied one step late.",
        "detonation-random": "A random sixteenth of the momentum at every step; steps by sign.",
        "detonation-striding": "As detonation-random, each sixteenth in turn.",
        "detonation-full": "The whole momentum at every step; steps by sign.",
        "spsa": "One byte a step: how far to go along a random direction. Learns slowly.",
        "noloco": "Random pairs exchange progress and weights: nobody waits for all.",
        "noloco-weights": "noloco with half the bytes: pairs exchange weights alone.",
        "gossip-adam": "Pairs average their weights at every step.",
        "a-edit": "edit, whose rounds begin when half of the peers are ready.",
        "fedbuff": "averaging whose rounds begin when half of the peers are ready.",
        "fedcompass": "Rounds of a minute: slow peers make fewer steps, and nobody waits.",
        "anarchic": "For peers of very unequal speed: rounds of a quarter of them, each at its own pace.",
        "delayed-nesterov": "For peers of very unequal speed: rounds of a quarter, with momentum every fourth time.",
        "adaptive-braking": "averaging a round late; gradients against the momentum count less.",
        "spike-compensation": "averaging a round late; older gradients count more.",
        "weight-prediction": "averaging a round late; gradients at the weights expected then.",
    }
)  # in a sentence each, for `murmur recipes`
