"""Do pipelines of unequal peers lose less where slow peers serve stages of fewer layers? In virtual time.

    python -m benchmarks.pipelining.dealt_layers [--seeds 3] [--layers 24] [--json]

The product's stage loops (`tests/protocol/pipeline/virtual`), 16 peers that own microbatches too, four stages, steps of
64 microbatches, from 40 to 160 s. `mixed`: each stage has a quarter of the layers and peers of all speeds, as today;
`dealt`: peers of like speed serve one stage, and it has layers in proportion to their speeds together. `fraction`:
microbatches done, over those that all peers together could compute if none ever waited. Speeds are 1:2:4:8, or drawn
between 1 and 8.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence

from tests.protocol.pipeline.virtual.faulty_world import FaultyWorld
from tests.protocol.pipeline.virtual.scenario import ACTIVATION, Scenario

STAGES, PEERS = 4, 16
STEP, IN_FLIGHT = 64, (4, 8)  # in flight of each peer
BEGIN, END = 40.0, 160.0
DELAY = 0.025
Speeds = tuple[tuple[float, ...], ...]


class QuietWorld(FaultyWorld):
    """A world without faults, probes and quotas, which publishes what peers measure every two seconds."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        super().__init__(scenario, 2 * seed)
        self.clock.schedule(2.0, self._publish)

    def _publish(self) -> None:
        self.publish()
        self.clock.schedule(2.0, self._publish)

    def done(self) -> int:
        return sum(peer.owner.counts.done for peer in self.peers.values())


def mixed(speeds: Sequence[float], layers: int) -> Speeds:
    """Deal the peers, so that each stage has slow and fast ones and about the same sum."""
    stages: list[list[float]] = [[] for _ in range(STAGES)]
    for speed in sorted(speeds, reverse=True):
        min((stage for stage in stages if len(stage) < PEERS // STAGES), key=sum).append(speed)
    return tuple(tuple(sorted(stage)) for stage in stages)


def dealt(speeds: Sequence[float], layers: int) -> Speeds:
    """Put peers of like speed together, and deal the layers by their speeds; return the speeds with these layers."""
    ordered, size = sorted(speeds), PEERS // STAGES
    groups = [ordered[start : start + size] for start in range(0, PEERS, size)]
    counts = [1] * STAGES
    for _ in range(layers - STAGES):  # each layer where it slows least
        counts[max(range(STAGES), key=lambda stage: sum(groups[stage]) / (counts[stage] + 1))] += 1
    usual = layers / STAGES
    return tuple(tuple(speed * usual / count for speed in group) for group, count in zip(groups, counts, strict=True))


def fraction(stages: Speeds, speeds: Sequence[float], in_flight: int, seed: int) -> float:
    """Return the share of the compute of all peers that ends in microbatches."""
    scenario = Scenario(
        stages, in_flight=in_flight, quota=10**9, owners=PEERS, step_size=STEP, memory=10**4 * ACTIVATION, delay=DELAY,
        steps_per_contribution=10**9,
    )  # fmt: skip
    world = QuietWorld(scenario, seed)
    world.run(BEGIN)
    before = world.done()
    world.run(END)
    return (world.done() - before) / (END - BEGIN) / (sum(speeds) / STAGES)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    found: dict[str, float] = {}
    for kind in ("1:2:4:8", "drawn"):
        for arrange in (mixed, dealt):
            for in_flight in IN_FLIGHT:
                values = []
                for seed in range(words.seeds):
                    chance = random.Random(seed)
                    drawn = [8 ** chance.random() for _ in range(PEERS)]
                    speeds = [1.0, 2.0, 4.0, 8.0] * STAGES if kind == "1:2:4:8" else drawn
                    values.append(fraction(arrange(speeds, words.layers), speeds, in_flight, seed))
                name = f"{kind} {arrange.__name__}, {in_flight} in flight"
                found[name] = round(statistics.fmean(values), 3)
                print(f"{name}: {found[name]} {[round(value, 3) for value in values]}", file=sys.stderr, flush=True)
    if words.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
