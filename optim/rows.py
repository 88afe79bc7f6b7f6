"""The rows of the table of methods: compositions of parts by name, with the options that differ from their defaults."""

import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from optim.parts import Scalar

Table = Mapping[str, Scalar]
Tables = Mapping[str, Table]


@dataclass(frozen=True)
class Recipe:
    """A row. `tables`: by part, its kind and the options that differ from the kind's defaults."""

    name: str
    paper: str
    tables: Tables


# What a message says about steep directions, the rounds that it missed have said already, and momentum repeats it: a
# round late counts an eighth (see docs/reference/recipes.md).
LATE: Final = 3.0
USUAL: Final[Tables] = types.MappingProxyType(
    {
        "inner": {"kind": "adamw"},
        "signal": {"kind": "pseudo-gradient"},
        "codec": {"kind": "fp16"},
        "feedback": {"kind": "none"},
        "topology": {"kind": "butterfly"},
        "aggregate": {"kind": "mean", "staleness": LATE},
        "update": {"kind": "nesterov", "learning_rate": 0.7, "momentum": 0.9, "shorten": True},
        "adoption": {"kind": "carry"},
    }
)
# What could not be sent is trained on from: what is sent later is then no second correction of the same errors.
INT8: Final[Mapping[str, Table]] = types.MappingProxyType(
    {
        "codec": {"kind": "int8"},
        "feedback": {"kind": "error"},
        "adoption": {"kind": "carry", "unsent": 1.0},
    }
)
AVERAGE: Final[Mapping[str, Table]] = types.MappingProxyType({"update": {"kind": "sgd", "learning_rate": 1.0}})
ALIKE: Final[Table] = types.MappingProxyType({"kind": "mean", "weights": "equal"})
BY_AGE: Final[Table] = types.MappingProxyType({**ALIKE, "staleness": 0.5, "over": "members"})
# Every step's gradient is exchanged, and only the update moves the weights.
EVERY_GRADIENT: Final[Mapping[str, Table]] = types.MappingProxyType(
    {
        "inner": {"kind": "gathering"},
        "signal": {"kind": "gradient"},
        "schedule": {"kind": "every-steps", "inner_steps": 1},
    }
)
FAST_MOMENTUM: Final[Mapping[str, Table]] = types.MappingProxyType(
    {
        **EVERY_GRADIENT,
        "feedback": {"kind": "error", "decay": 0.999},
        "update": {"kind": "sign", "learning_rate": 0.001, "weight_decay": 0.1},
    }
)
# A sixteenth of the weights moves in a step: ten times as far.
SUBSET: Final[Mapping[str, Table]] = types.MappingProxyType(
    {**FAST_MOMENTUM, "update": {"kind": "sign", "learning_rate": 0.01, "weight_decay": 0.1}}
)
SPARSE: Final[Mapping[str, Table]] = types.MappingProxyType(
    {
        "codec": {"kind": "topk", "k": 64},
        "feedback": {"kind": "error", "decay": 0.95},
        "topology": {"kind": "gather"},
        "aggregate": {"kind": "mean", "clip": True},
        "update": {"kind": "sgd", "learning_rate": 1.0},
    }
)


def _every(inner_steps: int | str, **options: Scalar) -> Table:
    return {"kind": "every-steps", "inner_steps": inner_steps, **options}


def _overlapped(inner_steps: int | str) -> Table:
    """The result of a round is taken when the next one's message is due: a whole round late."""
    return _every(inner_steps, ahead=inner_steps, delay=inner_steps)


def _recipe(name: str, paper: str, common: Tables = USUAL, **tables: Table) -> Recipe:
    return Recipe(name, paper, types.MappingProxyType({**USUAL, **common, **tables}))


SYNCHRONOUS: Final = (
    _recipe("diloco", "arXiv 2311.08105", INT8, schedule=_every(100)),
    _recipe("sparseloco", "arXiv 2508.15706", SPARSE, schedule=_every(30)),
    _recipe(
        "sparseloco-senders",
        "arXiv 2508.15706 as deployed (2603.08163)",
        SPARSE,
        schedule=_every(30),
        aggregate={"kind": "sender-mean", "clip": True},
    ),
    _recipe(
        "frugal",
        "arXiv 2603.08163, with our constants",
        SPARSE,
        schedule=_every(9, ahead=9),
        codec={"kind": "topk", "k": 64, "bits": 1},
        feedback={"kind": "error", "decay": 0.8},
        aggregate={"kind": "sender-mean", "clip": True},
        adoption={"kind": "carry", "unsent": 0.3},
    ),
    _recipe("averaging", "arXiv 1602.05629", {**INT8, **AVERAGE}, schedule=_every(30)),
    _recipe("adloco", "arXiv 2508.18182", INT8, schedule=_every(100), inner={"kind": "growing-batch"}),
    _recipe(
        "edit",
        "arXiv 2412.07210",
        schedule=_every(128),
        topology={"kind": "gather"},
        aggregate={"kind": "penalty", "statistics": "running"},
        update={"kind": "nesterov", "learning_rate": 0.7, "momentum": 0.8},
    ),
    _recipe(
        "local-adam",
        "arXiv 2505.22549 (its baseline)",
        AVERAGE,
        schedule=_every(64),
        signal={"kind": "inner-state", "first_every": 1, "second_every": 1},
        codec={"kind": "none"},
    ),
    _recipe(
        "des-loc",
        "arXiv 2505.22549",
        AVERAGE,
        schedule=_every(64),
        signal={"kind": "inner-state", "first_every": 3, "second_every": 6},
        codec={"kind": "none"},
    ),
    _recipe(
        "mt-dao",
        "arXiv 2510.05361",
        AVERAGE,
        schedule=_every(32),
        inner={"kind": "quasi-hyperbolic", "beta": 0.999, "weight": 0.9},
        signal={"kind": "inner-state", "first_every": 1, "second_every": 1},
        codec={"kind": "none"},
    ),
)
WARM: Final = (
    _recipe(
        "diloco-warm",
        "arXiv 2311.08105 with synchronous first rounds",
        INT8,
        schedule=_every("1 until 50 then 10 => 60 over 30"),
        update={
            "kind": "nesterov",
            "learning_rate": "1.0 until 50 then 0.7",
            "momentum": "0.0 until 50 then 0.5 -> 0.9 over 30",
            "shorten": True,
        },
    ),
    _recipe(
        "sparseloco-warm",
        "arXiv 2508.15706 with synchronous, dense first rounds",
        SPARSE,
        schedule=_every("1 until 50 then 10 => 30 over 30"),
        codec={"kind": "int8 until 50 then topk", "k": "256 until 50 then 256 => 64 over 30"},
    ),
)
OVERLAPPED: Final = (
    _recipe(
        "streaming-diloco",
        "arXiv 2501.18512",
        schedule=_every(100, fragments=4, ahead=5, delay=5),
        codec={"kind": "e3m0"},
        adoption={"kind": "mix", "alpha": 0.5},
    ),
    _recipe(
        "eager-diloco",
        "arXiv 2502.12996",
        INT8,
        schedule=_overlapped(100),
        # A round late, more would not be stable.
        update={"kind": "nesterov", "learning_rate": 0.4, "momentum": 0.6, "shorten": True},
        adoption={"kind": "carry", "keep": 0.125},
    ),
    _recipe(
        "dilocox",
        "arXiv 2506.21263",
        schedule=_overlapped("124 => 62 over 40"),
        codec={"kind": "low-rank", "rank": "32 => 16 over 40", "values": "int4", "energy": 0.95},
        feedback={"kind": "error"},
        topology={"kind": "gather"},
    ),
    _recipe(
        "co2",
        "arXiv 2401.16265",
        schedule=_overlapped(48),
        update={"kind": "staleness-penalised", "learning_rate": 1.0, "momentum": 0.5},
        adoption={"kind": "carry", "keep": 0.0},
    ),
)
EVERY_STEP: Final = (
    _recipe(
        "data-parallel",
        "arXiv 1711.05101 on the mean gradient",
        EVERY_GRADIENT,
        codec={"kind": "none"},
        update={"kind": "adam"},
    ),
    _recipe(
        "backup-workers",
        "arXiv 2004.14696",
        EVERY_GRADIENT,
        schedule=_every(1, quorum="0.5 -> 1.0 over 500"),
        codec={"kind": "none"},
        aggregate={**ALIKE, "staleness": 10.0},
        update={"kind": "adam"},
    ),
    _recipe(
        "qsdp",
        "arXiv 2302.02390",
        EVERY_GRADIENT,
        codec={"kind": "int8", "block": 1024, "rounding": "stochastic"},
        update={"kind": "adam"},
    ),
    _recipe(
        "one-bit-adam",
        "arXiv 2102.02888",
        EVERY_GRADIENT,
        signal={"kind": "momentum", "beta": 0.9},
        codec={"kind": "none until 100 then sign"},
        feedback={"kind": "error"},
        topology={"kind": "gather"},
        update={"kind": "frozen-adam", "warm_rounds": 100, "floor": 0.01},
    ),
    _recipe(
        "demo",
        "arXiv 2411.19870",
        FAST_MOMENTUM,
        codec={"kind": "dct-topk", "k": 32, "bits": 3},
        topology={"kind": "gather"},
    ),
    _recipe(
        "distro",
        "arXiv 2411.19870 as deployed",
        FAST_MOMENTUM,
        inner={"kind": "gathering-ahead", "beta": 0.999, "reach": 0.3},
        schedule=_overlapped(1),
        codec={"kind": "dct-topk", "k": 32, "bits": 1},
        topology={"kind": "gather"},
        aggregate={"kind": "sender-mean"},
    ),
    _recipe(
        "detonation-random",
        "arXiv 2502.06728",
        SUBSET,
        codec={"kind": "subset", "density": 0.0625, "values": "fp16"},
    ),
    _recipe(
        "detonation-striding",
        "arXiv 2502.06728",
        SUBSET,
        codec={"kind": "subset", "density": 0.0625, "values": "fp16", "selection": "striding"},
    ),
    _recipe("detonation-full", "arXiv 2502.06728", FAST_MOMENTUM),
    _recipe(
        "spsa",
        "arXiv 2306.10015",
        EVERY_GRADIENT,
        codec={"kind": "direction"},
        topology={"kind": "gather"},
        aggregate={**ALIKE, "clip": True},
        update={"kind": "sgd", "learning_rate": 1e-5},
    ),
)
GROUPS: Final = (
    _recipe(
        "noloco",
        "arXiv 2506.10911",
        schedule=_every(50),
        signal={"kind": "progress-and-anchor"},
        topology={"kind": "groups", "size": 2},
        aggregate=ALIKE,
        update={"kind": "gossip", "alpha": 0.5, "beta": 0.7, "gamma": 0.7},
    ),
    _recipe(
        "noloco-weights",
        "arXiv 2506.10911 with gamma = beta",
        schedule=_every(50),
        signal={"kind": "weights"},
        topology={"kind": "groups", "size": 2},
        aggregate=ALIKE,
        update={"kind": "gossip-weights", "alpha": 0.5, "beta": 0.7},
    ),
    _recipe(
        "gossip-adam",
        "arXiv 2410.11998",
        inner={"kind": "accumulating-adamw", "every": 4},
        schedule=_overlapped(1),
        signal={"kind": "weights"},
        topology={"kind": "groups", "size": 2, "pattern": "exponential"},
        aggregate=ALIKE,
        update={"kind": "replace"},
    ),
)
ASYNCHRONOUS: Final = (
    _recipe(
        "a-edit",
        "arXiv 2412.07210",
        schedule=_every(128, ahead=128, quorum=0.5),
        topology={"kind": "gather"},
        aggregate={"kind": "penalty", "statistics": "running", "tokens": 0.5},
        update={"kind": "nesterov", "learning_rate": 0.7, "momentum": 0.8},
    ),
    _recipe(
        "fedbuff",
        "arXiv 2106.06639",
        AVERAGE,
        schedule=_every(50, ahead=50, quorum=0.5),
        aggregate=BY_AGE,
    ),
    _recipe(
        "fedcompass",
        "arXiv 2309.14675",
        schedule=_every(100, least_steps=20, seconds=60.0),
        aggregate=BY_AGE,
        update={"kind": "sgd", "learning_rate": 0.9},
    ),
    _recipe(
        "anarchic",
        "arXiv 2108.09875",
        schedule=_every(20, ahead=80, quorum=0.25),
        signal={"kind": "pseudo-gradient", "equal_steps": 20},
        aggregate=ALIKE,
        update={"kind": "sgd", "learning_rate": 0.25},  # as the quorum: each peer moves the anchor by its share
    ),
    _recipe(
        "delayed-nesterov",
        "arXiv 2401.09135",
        schedule=_every(50, ahead=50, quorum=0.25),
        aggregate=ALIKE,
        update={"kind": "delayed-nesterov", "learning_rate": 0.7, "momentum": 0.9, "period": 4},
    ),
    *(
        _recipe(kind, paper, {**INT8, **AVERAGE}, schedule=_overlapped(30), inner={"kind": kind})
        for kind, paper in (
            ("adaptive-braking", "arXiv 2007.01397"),
            ("spike-compensation", "arXiv 2003.11666"),
            ("weight-prediction", "arXiv 2003.11666"),
        )
    ),
)
ROWS: Final = (*SYNCHRONOUS, *WARM, *OVERLAPPED, *EVERY_STEP, *GROUPS, *ASYNCHRONOUS)
RECIPES: Final[Mapping[str, Recipe]] = types.MappingProxyType({row.name: row for row in ROWS})
