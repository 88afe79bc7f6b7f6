"""The predictions, compared with the figures of the designs that they follow, and with what was measured."""

from typing import Any

import pytest

from node.commands.capacity import workload_of
from node.commands.plan.arithmetic import (
    place_peers,
    predict,
    round_bytes,
    speeds_alike,
    step_fraction,
    window_fraction,
    window_of,
)
from node.commands.plan.peers import typical_peers
from node.commands.plan.report import warnings_of
from node.model import all_cuts, shape_table, shapes_of
from protocol.manifest.sections import MethodSection
from protocol.pipeline.stage import StageManifest
from tests.node.commands.plan.plans import peer, peers, run_of

FAST = {"up": "1000mbit", "down": "1000mbit"}
SEVEN_BILLION = {"width": 4096, "layers": 32}
THIN = {"up": "20mbit", "down": "20mbit"}
TINY = {"width": 512, "layers": 8, "context": 512}
FORMATS = ("bf16", "int8", "bf16, subspace of width/8")


@pytest.mark.parametrize(
    ("run", "kind", "expected"),
    [
        ({}, {}, (0.19, 0.38, 1.00)),
        ({}, THIN, (0.04, 0.08, 0.31)),
        (SEVEN_BILLION, {"memory": "80GB"}, (0.71, 1.00, 1.00)),
        (SEVEN_BILLION, {"memory": "80GB", **THIN}, (0.14, 0.28, 1.00)),
        (TINY, {"tflops": 0.1, **THIN, "device": "cpu"}, (0.96, 1.00, 1.00)),
    ],
)
def test_links_feed_the_share_of_the_compute_that_the_reference_names(
    run: dict[str, Any], kind: dict[str, Any], expected: tuple[float, ...]
) -> None:
    """Begin with 1B in 4 stages, 20 TFLOP/s, 100 Mbit/s up.

    The reference has 0.37 and 0.07 in int8, because it counts 8 bytes for each block of 256; ours has 2.
    """
    found = predict(workload_of(run_of(**run)), [peer(**kind)])
    assert tuple(round(found.links_by_format[name], 2) for name in FORMATS) == pytest.approx(expected, abs=0.0051)
    assert found.links == found.links_by_format["bf16"]
    own = predict(workload_of(run_of(**run, activations="int8")), [peer(**kind)])
    assert own.links == pytest.approx(found.links_by_format["int8"], rel=1e-5)
    assert own.links_by_format["bf16"] == pytest.approx(found.links, rel=1e-5)
    model = run_of(**run).model
    narrow = run_of(**run).model_copy(update={"model": model.model_copy(update={"subspace": model.width // 8})})
    squeezed = predict(workload_of(narrow), [peer(**kind)])
    assert squeezed.links == squeezed.links_by_format["bf16"] == squeezed.links_by_format["bf16, subspace of width/8"]
    assert 0.75 * expected[2] < squeezed.links <= expected[2], "factors take fewer operations, which links must feed"


def test_prediction_is_the_product_of_its_limits_and_reaches_the_reference_with_fitting_stages() -> None:
    """Middle stages upload twice as much: with twice as many peers there, all links are full."""
    work = workload_of(run_of(in_flight=64))
    found = predict(work, [peer()])
    assert [placed.total() for placed in found.placement] == [2, 4, 4, 2]
    assert found.stages == pytest.approx(1.0, abs=0.01) and found.links == pytest.approx(0.19, abs=0.005)
    product = found.links * found.stages * found.window.fraction * found.step * found.round
    assert found.fraction == pytest.approx(product) and found.window.fraction == pytest.approx(1, abs=0.01)
    even = predict(work, [peer(count=8)])
    assert even.links == found.links and even.stages == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize(("microbatches", "expected"), [(4, 0.57), (16, 0.84), (64, 0.955), (256, 0.988)])
def test_step_fills_and_drains_the_pipeline(microbatches: int, expected: float) -> None:
    work = workload_of(run_of(batch_tokens=microbatches * 2048))
    equal = [peer(**FAST)]
    assert step_fraction(work, equal, place_peers(work, equal)) == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize(("microbatches", "expected"), [(64, 0.725), (256, 0.906)])
def test_fast_peers_wait_for_slow_ones_at_the_end_of_a_step(microbatches: int, expected: float) -> None:
    """Measured in virtual time for 64: 0.71 to 0.74 (docs/results/pipelines.md)."""
    work = workload_of(run_of(batch_tokens=microbatches * 2048))
    unequal, slower = peers((1, 2, 4, 8), **FAST), peers((0.01, 8), **FAST)
    fraction = step_fraction(work, unequal, place_peers(work, unequal))
    assert fraction == pytest.approx(expected, abs=0.005)
    assert 0.6 < step_fraction(work, slower, place_peers(work, slower)) < fraction, "no slower than was measured"


def test_peers_of_like_speed_serve_a_stage_with_layers_by_their_speed() -> None:
    kinds, mixed = peers((1, 2, 4, 8), memory="400GB", **FAST), workload_of(run_of(layers=48, in_flight=8))
    speeds, share = speeds_alike(mixed, kinds)
    assert speeds == (1.0, 2.0, 4.0, 8.0) and share == pytest.approx(0.98, abs=0.01)
    assert speeds_alike(workload_of(run_of(layers=12)), kinds)[1] == pytest.approx(0.8), "layers are whole"
    dealt = workload_of(run_of(layers=48, in_flight=8, speeds=speeds))
    assert [stage.layers for stage in dealt.stages] == [3, 6, 13, 26]
    served = [shapes_of(StageManifest.of(dealt.manifest, number)).numel for number in range(4)]
    assert [stage.parameters for stage in dealt.stages] == served, "what peers serve is what was planned"
    found, before = predict(dealt, kinds), predict(mixed, kinds)
    assert [dict(placed) for placed in found.placement] == [{0: 4}, {1: 4}, {2: 4}, {3: 4}]
    assert all(len(placed) == 4 for placed in before.placement), "the control has all speeds at each stage"
    assert found.stages * found.step > 0.9 > before.stages * before.step
    assert speeds_alike(mixed, kinds[:0]) == ((), 0.0)
    thin = peers((1, 2, 4, 8), memory="400GB", **THIN)
    assert place_peers(dealt, thin) == found.placement, "by compute alone"
    few = [peer(count=4, memory="400GB")]
    assert [placed.total() for placed in place_peers(dealt, few)] == [1, 1, 1, 1], "no stage without a peer"


def test_window_reaches_what_was_measured() -> None:
    """Four stages of peers of speeds 1:2:4:8, and 16, 32, 64 and 128 microbatches on their way."""
    assert [window_fraction(count / 16, False) for count in (16, 32, 64, 128)] == [0.65, 0.87, 0.97, 1.0]
    assert window_fraction(8 * 64 / 16, True) == 0.55 and window_fraction(64 / 16, True) == 0.97
    assert window_fraction(0.5, False) == 0.325 and window_fraction(1000, False) == 1.0


def test_large_window_costs_time_only_where_speeds_differ() -> None:
    work = workload_of(run_of(in_flight=64))
    unequal, equal = peers((2, 4), rtt=0, **FAST), peers((2, 2), rtt=0, **FAST)
    large = workload_of(run_of(in_flight=4096, memory=2**40))
    slow = window_of(large, unequal, place_peers(large, unequal), 0.1)
    assert slow.is_too_large and slow.fraction == pytest.approx(0.55)
    assert not window_of(large, equal, place_peers(large, equal), 0.1).is_too_large
    assert window_of(large, equal, place_peers(large, equal), 0.1).fraction == 1.0
    assert not window_of(work, equal, place_peers(work, equal), 0.1).is_limited_by_memory


def test_whole_model_has_no_limit_but_its_rounds() -> None:
    whole = run_of(stages=1, recipe="diloco", layers=4)
    unequal, found = (predict(workload_of(whole), kinds) for kinds in (peers((1, 2, 4, 8)), [peer(count=4)]))
    for each in (unequal, found):
        assert (each.links, each.stages, each.window.fraction, each.step) == (1.0, 1.0, 1.0, 1.0)
    assert found.fraction == found.round and 0 < found.round < 1
    assert not found.links_by_format
    thin = predict(workload_of(whole), [peer(count=4, **THIN)])
    assert thin.round < found.round, "a message takes longer on a thin link"
    assert predict(workload_of(whole), [peer(count=1)]).round == 1.0, "one peer sends nothing"


def test_steps_that_go_on_hide_the_exchange() -> None:
    """With as many steps ahead as a round has, only the bytes of a full link count."""
    run = run_of(stages=1, layers=4, recipe="diloco")
    waits = workload_of(run)
    method = MethodSection(recipe="diloco", schedule={"ahead": round(waits.steps)})
    goes_on = workload_of(run.model_copy(update={"method": method}))
    kinds = [peer(count=4, rtt=0, up="50mbit")]
    seconds = predict(waits, kinds).by_stage[0].round_seconds
    exchange = round_bytes(waits, waits.stages[0], 4) / 6.25e6
    assert 0.01 * seconds < exchange < seconds
    assert predict(waits, kinds).round == pytest.approx(seconds / (seconds + exchange))
    assert predict(goes_on, kinds).round == 1.0
    thin = [peer(count=4, rtt=0, up="2mbit")]
    assert predict(goes_on, thin).round == pytest.approx(seconds / (25 * exchange))


def test_each_topology_sends_its_own_bytes() -> None:
    gather = workload_of(run_of(stages=1, layers=2, recipe="frugal"))
    assert round_bytes(gather, gather.stages[0], 9) == 8 * gather.stages[0].message_bytes
    groups = workload_of(run_of(stages=1, layers=2, recipe="noloco"))
    assert round_bytes(groups, groups.stages[0], 9) == groups.stages[0].message_bytes
    butterfly = workload_of(run_of(stages=1, layers=2, recipe="averaging"))
    assert round_bytes(butterfly, butterfly.stages[0], 9) == pytest.approx(
        3 * 8 / 9 * butterfly.stages[0].message_bytes
    )


def test_peers_take_only_stages_that_they_can_hold() -> None:
    run = run_of(layers=4)
    small, card = peer(name="small", count=50, memory="1500MB"), peer()
    work = workload_of(run)
    assert work.stages[1].memory["cuda"] > 1.5e9, "no stage fits"
    found = predict(work, [small, card])
    assert all(placed[0] == 0 and placed[1] for placed in found.placement)
    assert found.fraction == predict(work, [card]).fraction, "peers that take no part are not part of the ideal"
    assert any(line.startswith("small: the smallest stage needs") for line in warnings_of(work, [small, card], found))


@pytest.mark.parametrize("stages", [1, 4])
def test_run_that_nobody_holds_or_that_lacks_a_stage_reaches_nothing(stages: int) -> None:
    work = workload_of(run_of(stages=stages))
    nobody = predict(work, [peer(memory="1GB")])
    assert nobody.fraction == nobody.rate == 0 and warnings_of(work, [peer(memory="1GB")], nobody)
    if stages > 1:
        few = predict(work, [peer(count=3)])
        assert few.fraction == 0
        assert "stage 3 has no peer" in "".join(warnings_of(work, [peer(count=3)], few))


def test_stages_are_those_of_the_model() -> None:
    """Equal stages are computed once, and are equal."""
    run = run_of(layers=7)
    work = workload_of(run)
    assert [stage.stage for stage in work.stages] == [0, 1, 2, 3]
    assert [stage.layers for stage in work.stages] == [2, 2, 2, 1]
    assert [stage.parameters for stage in work.stages] == [shape_table(run.model, cut).numel for cut in all_cuts(4)]
    whole = workload_of(run_of(layers=7, stages=1)).stages[0]
    assert sum(stage.flops for stage in work.stages) == pytest.approx(4 / 3 * whole.flops)
    assert (whole.layers, whole.sent_bytes, whole.held) == (7, 0, 0)


def test_small_models_are_for_cpus() -> None:
    runs = run_of(stages=1, width=128), run_of(stages=1, width=1024), run_of(width=128)
    small, large, cut = (typical_peers(run, shape_table(run.model).numel) for run in runs)
    assert {kind.device for kind in small} == {"cpu"}
    assert {kind.device for kind in large} == {kind.device for kind in cut} == {"cpu", "cuda"}
    assert sum(kind.count for kind in small) == sum(kind.count for kind in large)


def test_typical_peers_suffice_to_start_a_run() -> None:
    assert sum(kind.count for kind in typical_peers(run_of(), 10**9)) == 8
    assert sum(kind.count for kind in typical_peers(run_of(stages=16), 10**9)) == 32
