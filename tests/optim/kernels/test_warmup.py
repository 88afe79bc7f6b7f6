import subprocess
import sys
from typing import Literal

import pytest

from optim.codecs.int_blocks import BlockInt8
from optim.compose import CODECS
from optim.kernels.warmup import all_methods
from optim.recipes import RECIPES

pytestmark = pytest.mark.slow

ROUNDINGS: tuple[Literal["nearest", "stochastic"], ...] = ("nearest", "stochastic")
KERNELS = """
import sys
from numba.extending import is_jitted

def signatures():
    modules = [module for name, module in sys.modules.items() if name.startswith("optim.")]
    kernels = {item for module in modules for item in vars(module).values() if is_jitted(item)}
    return {kernel: kernel.nopython_signatures for kernel in kernels if kernel.stats.cache_path}
"""
ROUND = """
import torch
from optim.exchange import Aggregator, ContributionEncoder
from optim.layout import Layout
from optim.compose import compose
from optim.kernels.warmup import warm_up
from optim.round_plan import RoundPlanner

def known():
    return sum(map(len, signatures().values()))

for codec in ("none", "int4", "topk"):
    before = known()
    parts = {"codec": {"kind": codec}, "topology": {"kind": "gather"}, "update": {"kind": "sgd"}}
    method = compose("diloco", parts)
    warm_up(method)
    warmed_up = known()
    planner = RoundPlanner(method, Layout(((300, 301), (7,))), 1)
    delta = torch.randn(planner.numel)
    payloads = ContributionEncoder(planner).encode(0, delta, torch.zeros(planner.numel))
    aggregator = Aggregator(planner)
    received = [aggregator.decode_part(0, form(payloads[0]), 0) for form in (bytes, bytearray, memoryview)]
    merged = aggregator.merge(0, received, [1.0, 0.3, 0.2], {"usual_norm": torch.zeros(1)}).vector
    merged.to_dense()
    planner.apply_outer_step(planner.plan(0), delta, {}, merged, 1.0, [1.0, 0.3, 0.2])
    ContributionEncoder(planner).restore_to_residual(0, payloads, torch.zeros(planner.numel), -0.5)
    print(warmed_up - before, known() - warmed_up)
"""
ALL = """
from optim.kernels.warmup import all_methods, warm_up
for method in all_methods():
    warm_up(method)
for kernel, found in signatures().items():
    print(kernel.py_func.__module__, kernel.__name__, len(found))
"""


def run(source: str) -> list[list[str]]:
    """Run it in a process that may have to compile everything, and return its words line by line."""
    done = subprocess.run([sys.executable, "-c", KERNELS + source], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.timeout(600)
def test_round_after_the_warmup_compiles_nothing() -> None:
    for warmed_up, after in run(ROUND):
        assert int(after) == 0 < int(warmed_up)  # there was something to be compiled


@pytest.mark.timeout(600)
def test_every_kernel_is_compiled_for_one_signature() -> None:
    """With more, processes that compile at the same time could write different machine code to one file."""
    counts = run(ALL)
    assert len(counts) > 30
    assert [line for line in counts if line[-1] != "1"] == []


def test_every_recipe_and_codec_is_warmed_up_with_every_choice_of_words() -> None:
    methods = list(all_methods())
    assert {method.name for method in methods} == set(RECIPES)
    assert {method.codec.kind for method in methods} == set(CODECS)
    assert {str(method.codec) for method in methods} >= {str(BlockInt8(rounding=r)) for r in ROUNDINGS}
