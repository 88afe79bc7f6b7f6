"""Measure which share of the time peers compute by link and by steps between messages, in a setting others published.

    python benchmarks/grid.py [--points 128x50 8x200 ...] [--again] [--rounds N] [--plot]

The setting is that of github.com/Adnan082/diloco-measured: four peers, a `llama` of 30.8 million parameters, steps of
2,048 tokens that take 26.5 ms on a card (L40S), 128 or 8 steps between messages, links of 50 to 5,000 Mbit/s. There,
DiLoCo sends fp32 over gloo while the cards wait; here, `frugal` sends while they train on. The peers are real ones
behind limited links (network namespaces), except that their trainers play the card (`benchmarks.played_card`).

Measures one point after the other and records each in docs/results/grid.json with date and commit; a point that is
recorded is left alone, unless `--again`. By point:

    computing     steps made x 26.5 ms over the time, from contribution to contribution, mean of the peers
    planned       the same as `murmur plan` predicts it
    megabytes     sent by a peer in a round, by the counter of its interface (packets and acknowledgements included)
    core_seconds  of a processor, by all processes of a peer in a round
    seconds       of the trainers, by activity, as shares of the time

`--plot` draws docs/images/grid.svg and the table of docs/results/grid.md from the records instead. Takes two minutes a
point; needs root, iproute2, nftables and iptables. Exit code 1 where `computing` is below 0.97 at 128 steps, or more
than a tenth from `planned`.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Final

from benchmarks.bars import Panel, render_bars
from benchmarks.played_card import FOLDER_VARIABLE, MODULE, STEP_VARIABLE
from benchmarks.revision import commit
from node.commands.capacity import workload_of
from node.commands.plan.arithmetic import predict
from node.commands.plan.peers import PeerKind
from protocol.manifest.run import Manifest
from tests.netlab.lab.lab_swarm import LabSwarm, running_lab_swarm
from tests.netlab.lab.laboratory import Laboratory, Link
from tests.netlab.lab.namespaces import reason_unavailable
from tests.swarm.process_swarm import daemon_pid
from tests.swarm.processes import process_tree

ROOT = Path(__file__).parent.parent
RECORD, PLOT = ROOT / "docs" / "results" / "grid.json", ROOT / "docs" / "images" / "grid.svg"
PAGE = ROOT / "docs" / "results" / "grid.md"
PEERS = 4
STEP_SECONDS = 0.0265
LINKS = (50, 200, 1000, 5000)
# Shares of the time, medians of three runs, as its README of 2026-08-18 gives them.
THEIRS: Final = MappingProxyType({128: (0.1155, 0.3609, 0.7152, 0.8700), 8: (0.0055, 0.0248, 0.1235, 0.4024)})
VALUES: Final = MappingProxyType({128: 64, 8: 16})  # of 4,096 in a message
WARM_ROUNDS = 3
ROUNDS: Final = MappingProxyType({128: 8, 8: 24})
TARGET, TOLERANCE = 0.97, 0.1
RUN_SECONDS = 400.0


@dataclass(frozen=True)
class Point:
    """A measured point; `seconds` are shares of the time."""

    steps: int
    mbit: int
    computing: float
    planned: float
    theirs: float
    megabytes: float
    core_seconds: float
    rounds: int
    round_seconds: float
    seconds: dict[str, float]
    cores: int
    date: str
    commit: str

    @property
    def name(self) -> str:
        return f"{self.steps}x{self.mbit}"


def main() -> int:
    names = [f"{steps}x{mbit}" for steps in THEIRS for mbit in LINKS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--points", nargs="*", default=names, choices=names)
    parser.add_argument("--again", action="store_true", help="measure recorded points as well")
    parser.add_argument("--rounds", type=int, help="to measure, after the first three")
    parser.add_argument("--json", action="store_true", help="print the recorded points as one JSON object, at the end")
    parser.add_argument("--plot", action="store_true", help="draw the plot and the table of the recorded points")
    options = parser.parse_args()
    if options.plot:
        PLOT.write_text(render_svg(recorded()))
        before, mark, rest = PAGE.read_text().partition("<!-- grid -->\n")
        PAGE.write_text(f"{before}{mark}\n{table(recorded())}\n{rest[rest.index('<!-- end -->') :]}")
        return 0
    if reason := reason_unavailable():
        parser.error(reason)
    known = {point.name for point in recorded()}
    for name in options.points:
        if options.again or name not in known:
            steps, mbit = map(int, name.split("x"))
            record(measure(steps, mbit, options.rounds or ROUNDS[steps]))
    print(json.dumps({point.name: asdict(point) for point in recorded()}) if options.json else table(recorded()))
    return int(not all(map(is_good, recorded())))


def recorded() -> list[Point]:
    return [Point(**values) for values in json.loads(RECORD.read_text())] if RECORD.exists() else []


def record(point: Point) -> None:
    """Add or replace a point."""
    points = {entry.name: entry for entry in recorded()} | {point.name: point}
    ordered = sorted(points.values(), key=lambda entry: (-entry.steps, entry.mbit))
    RECORD.write_text(json.dumps([asdict(entry) for entry in ordered], indent=1) + "\n")


def is_good(point: Point) -> bool:
    enough = point.steps < max(THEIRS) or point.computing >= TARGET
    return enough and abs(point.computing - point.planned) <= TOLERANCE * point.planned


def manifest_of(steps: int) -> Manifest:
    return Manifest.model_validate(
        {
            "run": {"name": "grid", "min_peers": PEERS},
            "model": {
                "vocabulary": 50_257, "width": 256, "layers": 6, "heads": 16, "hidden": 768, "context": 512,
                "tied": False,
            },
            "data": {"source": "text", "path": "corpus.txt"},
            "train": {"batch_tokens": 2048, "microbatch": 4, "learning_rate": 3e-4},
            "method": {
                "recipe": "frugal",
                "schedule": {"inner_steps": steps, "ahead": steps},
                "codec": {"k": VALUES[steps]},
            },
        }
    )  # fmt: skip


def planned_share(steps: int, mbit: int, cores: float) -> float:
    """Return the prediction for peers with so many cores each."""
    work = workload_of(manifest_of(steps))
    flops = sum(stage.flops for stage in work.stages) * work.step_microbatches / STEP_SECONDS
    values = {"name": "L40S", "count": PEERS, "tflops": flops / 1e12, "memory": "48GB", "rtt": 1.0, "cores": cores}
    return predict(work, [PeerKind.model_validate({**values, "up": f"{mbit}mbit", "down": f"{mbit}mbit"})]).fraction


def measure(steps: int, mbit: int, rounds: int) -> Point:
    """Run the peers of a point."""
    manifest = manifest_of(steps)
    with tempfile.TemporaryDirectory(prefix="mm", dir="/tmp") as folder, Laboratory() as laboratory:
        logs = Path(folder) / "logs"
        logs.mkdir()
        os.environ |= {STEP_VARIABLE: str(STEP_SECONDS), FOLDER_VARIABLE: str(logs)}
        nodes = [laboratory.ordinary_node(Link(up=mbit, down=mbit)) for _ in range(PEERS)]
        with running_lab_swarm(Path(folder), manifest, laboratory, nodes) as swarm:
            for peer in swarm.lab_peers:
                peer.replace_module(MODULE)
            swarm.start()
            spent = spend_rounds(swarm, laboratory, rounds)
            return summarise(steps, mbit, spent, [read_log(path, rounds) for path in logs.iterdir()])


@dataclass(frozen=True)
class Spent:
    """Bytes and core-seconds of a peer."""

    bytes: float
    core_seconds: float


def spend_rounds(swarm: LabSwarm, laboratory: Laboratory, rounds: int) -> Spent:
    """Let the rounds pass; return what a peer spent in one of them."""

    def wait_for(number: int) -> tuple[int, Spent]:
        swarm.wait_until(lambda: swarm.highest_round(swarm.peers[0]) >= number, f"round {number}", RUN_SECONDS)
        sent = sum(laboratory.interface_bytes(node)[0] for node in swarm.nodes)
        times = [process.cpu_times() for peer in swarm.peers for process in process_tree(daemon_pid(peer))]
        return swarm.highest_round(swarm.peers[0]), Spent(sent, sum(each.user + each.system for each in times))

    swarm.wait_until(lambda: len(swarm.poll()) == PEERS, "all peers are there")
    first, before = wait_for(WARM_ROUNDS)
    last, after = wait_for(first + rounds + 1)
    count = PEERS * (last - first)
    return Spent((after.bytes - before.bytes) / count, (after.core_seconds - before.core_seconds) / count)


@dataclass(frozen=True)
class Stretch:
    """What a trainer did between two of its contributions."""

    seconds: float
    steps: int
    rounds: int
    by_activity: dict[str, float]


def read_log(path: Path, rounds: int) -> Stretch:
    lines = [json.loads(line) for line in path.read_text().splitlines()][WARM_ROUNDS:][: rounds + 1]
    first, last = lines[0], lines[-1]
    activities = {name: value - first["seconds"].get(name, 0.0) for name, value in last["seconds"].items()}
    return Stretch(last["at"] - first["at"], last["step"] - first["step"], len(lines) - 1, activities)


def summarise(steps: int, mbit: int, spent: Spent, stretches: Sequence[Stretch]) -> Point:
    index = LINKS.index(mbit)
    names = sorted({name for stretch in stretches for name in stretch.by_activity})
    shares = {
        name: round(statistics.fmean(s.by_activity.get(name, 0.0) / s.seconds for s in stretches), 4) for name in names
    }
    cores = len(os.sched_getaffinity(0))
    return Point(
        steps, mbit,
        computing=round(statistics.fmean(s.steps * STEP_SECONDS / s.seconds for s in stretches), 4),
        planned=round(planned_share(steps, mbit, cores / PEERS), 4),
        theirs=THEIRS[steps][index],
        megabytes=round(spent.bytes / 1e6, 3),
        core_seconds=round(spent.core_seconds, 3),
        rounds=min(s.rounds for s in stretches),
        round_seconds=round(statistics.fmean(s.seconds / s.rounds for s in stretches), 3),
        seconds=shares,
        cores=cores,
        date=datetime.now(UTC).date().isoformat(),
        commit=commit(),
    )  # fmt: skip


def table(points: Sequence[Point]) -> str:
    """Return the points as a table in Markdown."""
    head = "| steps | Mbit/s | theirs | ours | `murmur plan` | MB a round | core-seconds | seconds a round |"
    rows = [
        f"| {p.steps} | {p.mbit:,} | {p.theirs:.3f} | {p.computing:.3f} | {p.planned:.3f} | {p.megabytes:.2f} "
        f"| {p.core_seconds:.2f} | {p.round_seconds:.2f} |\n"
        for p in points
    ]
    return f"{head}\n{'|---' * 8}|\n{''.join(rows)}"


def render_svg(points: Sequence[Point]) -> str:
    """Draw a panel of bars for each number of steps: theirs and ours by link."""
    return render_bars([panel_of(steps, [point for point in points if point.steps == steps]) for steps in THEIRS])


def panel_of(steps: int, points: Sequence[Point]) -> Panel:
    return Panel(
        f"{steps} steps between messages",
        ("diloco-measured", "Murmuration, frugal"),
        [(f"{point.mbit:,}", (point.theirs, point.computing)) for point in points],
        "% of the time computing, by Mbit/s of each peer's link",
    )


if __name__ == "__main__":
    sys.exit(main())
