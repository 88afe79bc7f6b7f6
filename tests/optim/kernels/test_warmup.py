import subprocess
import sys
from typing import Literal

import pytest

from optim.codecs.int_blocks import BlockInt8
from optim.compose import CODECS
from optim.kernels.warmup import _all_methods
from optim.recipes import RECIPES

ROUNDINGS: tuple[Literal["nearest", "stochastic"], ...] = ("nearest", "stochastic")
ROUND = """
import torch
from optim.compiled import LOOPS
from optim.exchange import Merger, Sender
from optim.layout import Layout
from optim.program import Program
from optim.recipes import compose
from optim.rehearsal import rehearse

def known():
    return sum(len(loop.signatures) for loop in LOOPS)

for codec in ("none", "int4", "topk"):
    before = known()
    parts = {"codec": {"kind": codec}, "topology": {"kind": "gather"}, "update": {"kind": "sgd"}}
    method = compose("diloco", parts)
    rehearse(method)
    rehearsed = known()
    program = Program(method, Layout(((300, 301), (7,))), 1)
    delta = torch.randn(program.numel)
    payloads = Sender(program).message(0, delta, torch.zeros(program.numel))
    merger = Merger(program)
    received = [merger.read(0, form(payloads[0]), 0) for form in (bytes, bytearray, memoryview)]
    merged = merger.merge(0, received, [1.0, 0.3, 0.2])
    merged.dense()
    program.moved(program.plan(0), delta, {}, merged, 1.0, [1.0, 0.3, 0.2])
    Sender(program).take_back(0, payloads, torch.zeros(program.numel), -0.5)
    print(rehearsed - before, known() - rehearsed)
"""


@pytest.mark.timeout(600)  # in a process that may have to compile everything
def test_a_round_after_it_compiles_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", ROUND], capture_output=True, text=True, check=True, timeout=500)
    for line in done.stdout.splitlines():
        rehearsed, after = map(int, line.split())
        assert after == 0 < rehearsed  # there was something to be compiled


def test_every_recipe_and_codec_is_compiled_for_with_every_choice_of_words() -> None:
    methods = list(_all_methods())
    assert {method.name for method in methods} == set(RECIPES)
    assert {method.codec.kind for method in methods} == set(CODECS)
    assert {str(method.codec) for method in methods} >= {str(BlockInt8(rounding=r)) for r in ROUNDINGS}
