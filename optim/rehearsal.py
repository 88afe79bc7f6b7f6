"""What a round does with many values, done once with few: loops are compiled before a round waits for them.

    python -m optim.rehearsal [everywhere]

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

from optim.codecs.codec import Codec
from optim.compiled import LOOPS
from optim.exchange import Merger, Sender
from optim.layout import Layout
from optim.machine_code import processor
from optim.method import Method
from optim.program import Program
from optim.recipes import CODECS, compose
from optim.rows import RECIPES

MATRIX: Final = (40, 130)  # more than a block, and not a whole number of them
WEIGHTS: Final = (1.0, 0.5)
LEVELS: Final = ("x86-64-v3", "x86-64-v4")
EVERYWHERE, AS_TOLD = "everywhere", "as-told"  # for all levels; what the standard input lists


def rehearse(method: Method) -> None:
    """Rounds of this method, one wherever its options turn, with two members and a model of a matrix a fragment."""
    program = Program(method, Layout((MATRIX,) * method.schedule.fragments + ((3,),)), 1)
    for number in method.knots:
        _round(program, number)


def _round(program: Program, number: int) -> None:
    plan, sender, merger = program.plan(number), Sender(program), Merger(program)
    method, values = plan.method, np.random.default_rng(0).standard_normal(program.message_numel, np.float32)
    residual = torch.zeros(values.size)
    payloads = [sender.message(number, torch.from_numpy(values), residual)[0] for _ in WEIGHTS]
    sender.take_back(number, payloads[:1], residual, 0.5)
    if method.topology.kind == "butterfly":
        payloads = [merger.reduce_part(number, 0, payloads, WEIGHTS)]
    memory = torch.zeros(method.aggregate.memory) if method.aggregate.memory else None
    slots = {name: torch.zeros(method.size_of(name, program.numel)) for name in method.slots}
    for messages in (payloads, [merger.read(number, payload, 0) for payload in payloads]):
        merged = merger.merge(number, messages, WEIGHTS[: len(payloads)], memory)
        merged.dense()
        program.moved(plan, torch.zeros(program.numel), slots, merged, 1.0, WEIGHTS)


def _methods() -> Iterator[Method]:
    """All recipes, and each codec with every choice of words that it offers."""
    yield from map(compose, RECIPES)
    for name, kind in CODECS.items():
        feedback = {"kind": "error" if kind.shrinks else "none"}
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
    command = [sys.executable, "-m", __spec__.name, AS_TOLD]
    subprocess.run(command, input=known, env=environment, check=True, text=True)


def _known() -> str:
    """All loops that were called, with the kinds of arguments."""
    found = [(loop.function.__module__, loop.function.__name__, loop.signatures) for loop in LOOPS]
    return json.dumps(found)


def main(arguments: list[str]) -> None:
    if arguments == [AS_TOLD]:
        for module, name, signatures in json.load(sys.stdin):
            for kinds in signatures:
                getattr(importlib.import_module(module), name).make(tuple((kind, axes) for kind, axes in kinds))
        return
    for method in _methods():
        rehearse(method)
    for level in LEVELS if arguments == [EVERYWHERE] else ():
        if processor().startswith("x86-64") and level != processor():
            _compile_for(level, _known())


if __name__ == "__main__":
    main(sys.argv[1:])
