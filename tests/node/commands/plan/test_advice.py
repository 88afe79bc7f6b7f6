"""Warnings appear where a layout cannot pay, and a good layout has none."""

from typing import Any

import pytest

from node.commands.capacity import workload_of
from node.commands.plan.arithmetic import predict
from node.commands.plan.peers import PeerKind
from node.commands.plan.report import warnings_of
from tests.node.commands.plan.plans import peer, peers, run_of

FAST = {"up": "1000mbit", "down": "1000mbit"}
GOOD = peer(count=16, rtt=20, **FAST)


def warnings(kinds: list[PeerKind] | tuple[PeerKind, ...], **changes: Any) -> list[str]:
    work = workload_of(run_of(**changes))
    return warnings_of(work, kinds, predict(work, kinds))


def test_good_layout_has_no_warnings() -> None:
    assert warnings([GOOD]) == []
    work = workload_of(run_of())
    assert predict(work, [GOOD]).fraction > 0.85
    assert warnings([peer(count=4)], stages=1, layers=4) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"activations": "fp32", "width": 512}, 'write pipeline.activations = "int8" or model.subspace = 64, use'),
        ({"in_flight": 1}, "pipeline.in_flight = 1 is too small for these peers and round trips; write about"),
        ({"memory": 2**27}, "pipeline.memory holds"),
        ({"batch_tokens": 4 * 2048}, "write train.batch_tokens = 98304"),
        ({"recipe": "diloco"}, "wait for their rounds"),
    ],
)
def test_one_fault_gives_its_warning(changes: dict[str, Any], expected: str) -> None:
    assert any(expected in line for line in warnings([GOOD], **changes))
    assert not any(expected in line for line in warnings([GOOD]))


def test_window_is_too_large_for_unequal_peers_only() -> None:
    """The advised window is neither too large nor too small."""
    unequal = peers((5, 10, 20, 40), rtt=20, **FAST)
    found = warnings(unequal, in_flight=1024, memory=2**40)
    assert any("is too large for peers of unequal speed" in line for line in found)
    work = workload_of(run_of(in_flight=1024, memory=2**40))
    advised = predict(work, unequal).window.advised
    assert not any("in_flight" in line for line in warnings(unequal, in_flight=advised, memory=2**40))
    assert not any("in_flight" in line for line in warnings([GOOD], in_flight=1024, memory=2**40))


def test_unequal_peers_are_told_of_stages_for_like_ones() -> None:
    unequal = peers((5, 10, 20, 40), rtt=20, **FAST)
    found = warnings(unequal, layers=48)
    assert sum("write pipeline.speeds = [1.0, 2.0, 4.0, 8.0]" in line for line in found) == 1
    for kinds, changes in (([GOOD], {}), (unequal, {"speeds": (1, 2, 4, 8)}), (peers((1, 100)), {"layers": 4})):
        assert not any("pipeline.speeds" in line for line in warnings(kinds, **{"layers": 48, **changes}))


def test_peer_that_holds_up_the_steps_of_others_is_named() -> None:
    tortoise = peer(name="tortoise", tflops=0.1, count=1, rtt=20, **FAST)
    found = warnings([GOOD, tortoise])
    assert sum("tortoise: a microbatch takes 39 s," in line for line in found) == 1
    assert not any("tortoise" in line for line in warnings([GOOD, tortoise], batch_tokens=2048 * 512))


def test_thin_links_and_lone_peers_are_named() -> None:
    found = warnings([peer(count=4)])
    assert any("links feed 0.19 of the compute" in line for line in found)
    assert any("stages 0-3 each have one peer" in line for line in found)


def test_message_that_is_too_large_for_its_round_is_named() -> None:
    found = warnings([peer(count=40, up="1mbit")], stages=1, layers=4, recipe="diloco")
    assert any("raise method.schedule.inner_steps" in line for line in found)
