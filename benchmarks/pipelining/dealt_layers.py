"""Do pipelines of unequal peers lose less where slow peers serve stages of fewer layers, or with larger steps?

    python -m benchmarks.pipelining.dealt_layers [--record docs/results/pipelines.json]

The product's stage loops (`tests/protocol/pipeline/virtual`) in virtual time: 16 peers that own microbatches too, four
stages, speeds 1:2:4:8 in all, one seed. `mixed`: each stage has a quarter of the layers and peers of all speeds;
`dealt`: peers of like speed serve one stage, and it has layers in proportion to their speeds together, as with
`pipeline.speeds`. `fraction`: microbatches done, over those that all peers together could compute if none ever waited;
`bound`: the same of the slowest stage, as layers are whole. A row takes one to five minutes, and rows that the file has
are not run again.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from node.model.shapes import deal_blocks
from tests.protocol.pipeline.virtual.faulty_world import FaultyWorld
from tests.protocol.pipeline.virtual.scenario import ACTIVATION, Scenario

STAGES, PEERS = 4, 16
SPEEDS = (1.0, 2.0, 4.0, 8.0) * STAGES
WINDOWS = {64: (40.0, 160.0), 128: (60.0, 220.0), 256: (100.0, 420.0)}  # seconds that count, by the size of a step
DELAY = 0.025
Speeds = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Row:
    """A layout. `layers`: of the model, 0 where all stages have as many; `in_flight`: of all peers together."""

    layers: int
    step: int
    in_flight: int

    @property
    def name(self) -> str:
        arrangement = f"dealt, {self.layers} layers" if self.layers else "mixed"
        return f"{arrangement}, steps of {self.step}, {self.in_flight} in flight"

    @property
    def rates(self) -> Speeds:
        """Return the microbatches a second of the peers of each stage."""
        return dealt(SPEEDS, self.layers) if self.layers else mixed(SPEEDS)

    @property
    def bound(self) -> float:
        return min(map(sum, self.rates)) / (sum(SPEEDS) / STAGES)


ROWS = (
    *(Row(0, 64, in_flight) for in_flight in (64, 128)),
    *(Row(layers, 64, in_flight) for layers in (12, 24, 48) for in_flight in (64, 128)),
    Row(48, 64, 256),
    *(Row(layers, 128, 64) for layers in (0, 24, 48)),
    *(Row(layers, 128, 128) for layers in (0, 48)),
    Row(0, 256, 64),
)


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


def mixed(speeds: Sequence[float]) -> Speeds:
    """Deal the peers, so that each stage has slow and fast ones and about the same sum."""
    stages: list[list[float]] = [[] for _ in range(STAGES)]
    for speed in sorted(speeds, reverse=True):
        min((stage for stage in stages if len(stage) < PEERS // STAGES), key=sum).append(speed)
    return tuple(tuple(sorted(stage)) for stage in stages)


def dealt(speeds: Sequence[float], layers: int) -> Speeds:
    """Put peers of like speed together, and deal the layers by their speeds; return the speeds with these layers."""
    ordered, size = sorted(speeds), PEERS // STAGES
    groups = [ordered[start : start + size] for start in range(0, PEERS, size)]
    work = (0.0, *(1.0,) * layers, 0.0)  # embedding and head cost nothing
    counts = [
        sum(work[block] for block in part) for part in deal_blocks(work, STAGES, [sum(group) for group in groups])
    ]
    usual = layers / STAGES
    return tuple(tuple(speed * usual / count for speed in group) for group, count in zip(groups, counts, strict=True))


def fraction(row: Row, seed: int = 0) -> float:
    """Return the share of the compute of all peers that ends in microbatches."""
    scenario = Scenario(
        row.rates, in_flight=row.in_flight // PEERS, quota=10**9, owners=PEERS, step_size=row.step,
        memory=10**4 * ACTIVATION, delay=DELAY, steps_per_contribution=10**9,
    )  # fmt: skip
    begin, end = WINDOWS[row.step]
    world = QuietWorld(scenario, seed)
    world.run(begin)
    before = world.done()
    world.run(end)
    return (world.done() - before) / (end - begin) / (sum(SPEEDS) / STAGES)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--record", type=Path, help="a file of rows, to which the missing ones are added")
    words = parser.parse_args()
    record: Path | None = words.record
    found: dict[str, Any] = json.loads(record.read_text()) if record and record.exists() else {"rows": {}}
    for row in ROWS:
        if row.name not in found["rows"]:
            figures = {"fraction": round(fraction(row), 3), "bound": round(row.bound, 3)}
            found["rows"][row.name] = {**asdict(row), **figures}
            found["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
            print(f"{row.name}: {figures}", flush=True)
            if record:
                record.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
