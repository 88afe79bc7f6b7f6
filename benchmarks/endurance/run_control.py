"""Control an endurance run of any kind: its swarm, its end, and whether all agree then."""

import sys
import time
from collections.abc import Callable

from benchmarks.endurance.run_observer import RunObserver
from protocol.manifest.run import Manifest
from tests.swarm.process_swarm import ENDLESS, ProcessSwarm, manifest_with

POLL_SECONDS = 0.2
RUN_SECONDS = 1800.0
AGREEMENT_SECONDS = 120.0


def make_manifest(seed: int, inner_steps: int, peers: int) -> Manifest:
    """A step of some milliseconds; a round long enough that a peer can come back in one."""
    return manifest_with(
        run={"seed": seed, "min_peers": peers},
        model={"width": 64, "layers": 2, "heads": 4, "hidden": 172, "context": 64},
        data={"source": "python-stdlib", "path": ""},
        train={"batch_tokens": 512, "microbatch": 8, "warmup_steps": 20},
        method={"recipe": "diloco", "schedule": {"inner_steps": inner_steps}},
        target={"rounds": ENDLESS},
    )


def run_until(
    watch: RunObserver, is_done: Callable[[], bool], act: Callable[[float], None] = lambda now: None,
    seconds: float = RUN_SECONDS,
) -> None:  # fmt: skip
    """Look and act again and again. SystemExit where it is not done after so many seconds."""
    ends = time.monotonic() + seconds
    while not is_done():
        if time.monotonic() > ends:
            raise SystemExit(f"the run has not ended after {seconds:.0f} s; it stands in round {watch.round}")
        watch.poll()
        act(time.monotonic())
        time.sleep(POLL_SECONDS)


def has_reached(tokens: int, watch: RunObserver) -> bool:
    """Whether a loss was measured there or beyond."""
    curve = watch.curve
    return bool(curve) and curve[-1][0] >= tokens


def wait_for_agreement(swarm: ProcessSwarm) -> bool:
    """Whether all come to the same model in the same round."""
    try:
        swarm.wait_for_agreement(AGREEMENT_SECONDS)
    except AssertionError as error:
        print(error, file=sys.stderr)
        return False
    return True
