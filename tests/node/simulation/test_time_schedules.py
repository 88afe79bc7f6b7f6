"""Contributions that are due at a time: every machine makes as many steps as it can, and all are in time."""

from dataclasses import replace

import pytest

from node.simulation.config import SimulationConfig
from node.simulation.measurement import compute_result
from node.simulation.swarm import VirtualSwarm
from tests.node.simulation.virtual_swarm import BATCH, Tables, make_config, make_method, run_to_target

pytestmark = pytest.mark.slow

SPEEDS = (4.0, 4.0, 2.0, 1.0)  # steps a second
TIMED: Tables = {"schedule": {"seconds": 10.0, "least_steps": 5}}


def patient() -> SimulationConfig:
    """Return a config with a grace as long as the slowest peer takes for all steps."""
    given = make_config(4, 120, speeds=SPEEDS)
    timing = given.manifest.round.model_copy(update={"grace": 60.0})
    return replace(given, manifest=given.manifest.model_copy(update={"round": timing}))


def steps_of(swarm: VirtualSwarm, round_number: int) -> list[int]:
    """Return the included steps by slot."""
    peers = sorted(swarm.live_peers, key=lambda peer: peer.slot)
    return [swarm.accounting.contributions[peer.peer_id, round_number].tokens // BATCH for peer in peers]


@pytest.mark.parametrize("recipe", ["fedcompass", "averaging"])
def test_steps_follow_the_speed_and_nobody_waits(recipe: str) -> None:
    """Dynamic local updates: H_i = v_i / max v * H, where H = 40 are the fastest peer's steps in the time."""
    timed, recorder = run_to_target(patient(), make_method(recipe, 40, TIMED))
    untimed: Tables = {"schedule": {"seconds": 0.0, "least_steps": 1}}
    stepped, plain = run_to_target(patient(), make_method(recipe, 40, untimed))
    for number in (0, 1):
        assert steps_of(timed, number) == pytest.approx([40, 40, 20, 10], abs=1)
    computing = [
        compute_result(swarm, told, 1.0).compute_share for swarm, told in ((timed, recorder), (stepped, plain))
    ]
    assert computing[0] > computing[1] + 0.15, "the control: the fast wait for the slow"


def test_steps_stay_within_their_limits() -> None:
    """FedCompass: K_min <= K_i <= K_max at any speed."""
    bounds: Tables = {"schedule": {"seconds": 10.0, "least_steps": 25}}
    swarm, _ = run_to_target(make_config(4, 120, speeds=(4.0, 4.0, 2.4, 2.4)), make_method("fedcompass", 38, bounds))
    for number in (0, 1):
        assert steps_of(swarm, number) == [38, 38, 25, 25]
