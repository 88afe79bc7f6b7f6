"""What a round does with many values, done once with few: loops are compiled before a round waits for them.

    python -m optim.kernels.warmup [everywhere]

compiles all loops of all recipes and codecs for this machine or, for an image, for every usual level of processors.
"""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Final, get_args, get_type_hints

import numpy as np
import torch

from optim.codecs.base import Codec
from optim.compose import CODECS, compose
from optim.exchange import Aggregator, ContributionEncoder
from optim.kernels.code_cache import processor
from optim.kernels.jit import JIT_FUNCTIONS
from optim.layout import Layout
from optim.method import Method
from optim.recipes import RECIPES
from optim.round_plan import RoundPlanner

MATRIX_SHAPE: Final = (40, 130)  # more than a block, and not a whole number of them
MEMBER_WEIGHTS: Final = (1.0, 0.5)
IMAGE_LEVELS: Final = ("x86-64-v3", "x86-64-v4")
ALL_LEVELS, FROM_STDIN = "everywhere", "as-told"  # for all levels; what the standard input lists


def warm_up(method: Method) -> None:
    """Rounds of this method, one wherever its options turn, with two members and a model of a matrix a fragment."""
    program = RoundPlanner(method, Layout((MATRIX_SHAPE,) * method.schedule.fragments + ((3,),)), 1)
    for number in method.breakpoints:
        _run_round(program, number)


def _run_round(program: RoundPlanner, number: int) -> None:
    plan, sender, merger = program.plan(number), ContributionEncoder(program), Aggregator(program)
    method, values = plan.method, np.random.default_rng(0).standard_normal(program.signal_numel, np.float32)
    residual = torch.zeros(values.size)
    payloads = [sender.encode(number, torch.from_numpy(values), residual)[0] for _ in MEMBER_WEIGHTS]
    sender.restore_to_residual(number, payloads[:1], residual, 0.5)
    if method.topology.reduces_parts:
        payloads = [merger.reduce_part(number, 0, payloads, MEMBER_WEIGHTS)]
    memory = torch.zeros(method.aggregate.state_size) if method.aggregate.state_size else None
    slots = {name: torch.zeros(method.slot_numel(name, program.numel)) for name in method.slots}
    for messages in (payloads, [merger.decode_part(number, payload, 0) for payload in payloads]):
        merged = merger.merge(number, messages, MEMBER_WEIGHTS[: len(payloads)], memory)
        merged.to_dense()
        program.apply_outer_step(plan, torch.zeros(program.numel), slots, merged, 1.0, MEMBER_WEIGHTS)


def _all_methods() -> Iterator[Method]:
    """All recipes, and each codec with every choice of words that it offers."""
    yield from map(compose, RECIPES)
    for name, kind in CODECS.items():
        feedback = {"kind": "error" if kind.is_contractive else "none"}
        for option in _choices(kind):
            yield compose("diloco", {"codec": {"kind": name, **option}, "feedback": feedback})


def _choices(kind: type[Codec]) -> Iterator[dict[str, str]]:
    yield {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        for choice in get_args(get_type_hints(kind)[field.name]):
            if isinstance(choice, str):
                yield {field.name: choice}


def _compile_for(level: str, known: str) -> None:
    """In a process of its own, which runs none of it: this processor may not be of that level."""
    environment = os.environ | {"NUMBA_CPU_NAME": level}
    command = [sys.executable, "-m", __spec__.name, FROM_STDIN]
    subprocess.run(command, input=known, env=environment, check=True, text=True)


def _compiled_signatures() -> str:
    """All loops that were called, with the kinds of arguments."""
    found = [(loop.function.__module__, loop.function.__name__, loop.signatures) for loop in JIT_FUNCTIONS]
    return json.dumps(found)


def main(arguments: list[str]) -> None:
    if arguments == [FROM_STDIN]:
        for module, name, signatures in json.load(sys.stdin):
            for kinds in signatures:
                getattr(importlib.import_module(module), name).make(tuple((kind, axes) for kind, axes in kinds))
        return
    for method in _all_methods():
        warm_up(method)
    for level in IMAGE_LEVELS if arguments == [ALL_LEVELS] else ():
        if processor().startswith("x86-64") and level != processor():
            _compile_for(level, _compiled_signatures())


if __name__ == "__main__":
    main(sys.argv[1:])
