"""Long flights through bad weather: eight real peers on poor links, and every 15 seconds something breaks.

    python benchmarks/soak.py --minutes 30 [--peers 8] [--seed 0] [--warm-up 15] [--json]

Links of 20 Mbit/s, packets 30 to 50 ms on their way, 1 % lost. The faults, drawn by the seed: kill -9 of a peer, one
that was killed comes back, a machine stands still for some seconds (SIGSTOP, SIGCONT), a line is cut for some.
At the end all come back, and must agree. `longest_standstill`: seconds that a living peer went without a round;
`longest_start`: that one took from its start to its first answer (eight share this machine's cores). Then the same run
without faults, on the same links, until as many tokens are in its committed rounds; the losses of the last tenth of
them are compared. `growth` and `calm_growth`, an hour, with faults and without: of the daemons that live for twenty
minutes behind the warm-up (with faults two, which are cut off and sleep, but are never killed), the middle and the
greatest slope of each minute's least (resident and shared memory in MB, descriptors, threads). On slow machines memory
comes to rest later: give a longer `--warm-up`, and as many more `--minutes`.

Takes twice the minutes, and 3 more. Needs root, iproute2, nftables and iptables. Exit code 1 where somebody stood still
for a minute, the peers do not agree, the loss is worse by more than 1 %, or the middle growth of resident memory is
above 1 MB an hour in either flight.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.endurance.faults import FaultInjector
from benchmarks.endurance.resources import WARM_UP_SECONDS, Growth, ResourceMonitor
from benchmarks.endurance.run_control import has_reached, make_manifest, run_until, wait_for_agreement
from benchmarks.endurance.run_observer import RunObserver, loss_up_to
from tests.netlab.lab.lab_swarm import LabSwarm, running_lab_swarm
from tests.netlab.lab.laboratory import Laboratory, Link
from tests.netlab.lab.namespaces import reason_unavailable

WEATHER = Link(up=20, down=20, delay=0.03, jitter=0.02, loss=0.01)
INNER_STEPS = 100
STUCK_SECONDS = 60.0
CALM_TIMES = 2  # as long as the one with faults may the one without them take: one noisy hour is not like another
ALLOWED_EXCESS = 0.01
ALLOWED_GROWTH = 1.0


@dataclass(frozen=True)
class Report:
    """Losses at equal tokens; growth by quantity, in a flight long enough."""

    minutes: float
    faults: dict[str, int]
    rounds: int
    longest_standstill: float
    longest_start: float
    digests_equal: bool
    loss: float
    calm_loss: float
    growth: Mapping[str, Growth] = field(default_factory=dict)
    calm_growth: Mapping[str, Growth] = field(default_factory=dict)

    @property
    def excess(self) -> float:
        return self.loss / self.calm_loss - 1

    @property
    def passed(self) -> bool:
        grown = [growth["resident_mb"] for growth in (self.growth, self.calm_growth) if "resident_mb" in growth]
        is_flat = all(growth.middle <= ALLOWED_GROWTH for growth in grown)
        is_going = max(self.longest_standstill, self.longest_start) <= STUCK_SECONDS
        return is_flat and is_going and self.digests_equal and self.excess <= ALLOWED_EXCESS


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm-up", type=float, default=WARM_UP_SECONDS / 60, help="minutes of a daemon's life")
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    reason = reason_unavailable()
    if reason is not None:
        parser.error(reason)
    report = measure(words.minutes, words.peers, words.seed, 60 * words.warm_up)
    print(json.dumps(asdict(report)) if words.json else table(report))
    return int(not report.passed)


def measure(minutes: float, peers: int, seed: int, warm_up: float) -> Report:
    resources, calm_resources = ResourceMonitor(warm_up), ResourceMonitor(warm_up)
    with flight(peers, seed) as (swarm, watch):
        faults = FaultInjector(swarm, watch, seed)

        def act(now: float) -> None:
            faults.step(now)
            watch.absent = faults.absent
            resources.sample([peer for peer in swarm.peers if peer.is_running and peer.name not in faults.absent], now)

        ends = time.monotonic() + 60 * minutes
        run_until(watch, lambda: time.monotonic() > ends and bool(watch.curve), act, 60 * minutes + STUCK_SECONDS)
        curve, rounds = watch.curve, watch.round
        tokens = curve[-1][0]
        loss = loss_up_to(curve, tokens)
        faults.stop()
        watch.absent = []
        agreed = wait_for_agreement(swarm)
        growth = resources.growth()
        standstill, start = watch.standstill.worst, watch.starting.worst
        print(f"  {rounds} rounds, {dict(faults.counts)}, agreed: {agreed}, loss {loss:.3f}", file=sys.stderr)
        print(f"  longest without a round: {watch.standstill.longest}; growth: {growth}", file=sys.stderr)
        print(f"  longest start: {watch.starting.longest}", file=sys.stderr)
    with flight(peers, seed) as (swarm, calm):
        look = partial(calm_resources.sample, swarm.peers)
        run_until(calm, lambda: has_reached(tokens, calm), look, CALM_TIMES * 60 * minutes + STUCK_SECONDS)
        calm_loss, calm_growth = loss_up_to(calm.curve, tokens), calm_resources.growth()
    counts = dict(faults.counts)
    return Report(minutes, counts, rounds, standstill, start, agreed, loss, calm_loss, growth, calm_growth)


@contextmanager
def flight(peers: int, seed: int) -> Iterator[tuple[LabSwarm, RunObserver]]:
    """All are there, and the first round is done: that eight have started at once is no standstill of theirs."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mm", dir="/tmp"))
        laboratory = stack.enter_context(Laboratory())
        nodes = [laboratory.node(WEATHER) for _ in range(peers)]
        manifest = make_manifest(seed, INNER_STEPS, peers)
        swarm = stack.enter_context(running_lab_swarm(Path(folder), manifest, laboratory, nodes))
        start = RunObserver(swarm)
        swarm.start()
        run_until(start, lambda: start.round >= 1)
        yield swarm, RunObserver(swarm)


def table(report: Report) -> str:
    struck = ", ".join(f"{count} x {kind}" for kind, count in sorted(report.faults.items()))
    lines = [
        f"{report.minutes:g} minutes, {report.rounds} rounds; {struck}",
        f"longest without a round {report.longest_standstill:.0f} s, longest start {report.longest_start:.0f} s",
        f"digests {'equal' if report.digests_equal else 'DIFFER'}",
        f"loss {report.loss:.3f}, without faults {report.calm_loss:.3f}: {report.excess:+.2%}",
        "",
        "| growth an hour | lives | middle | greatest | standard error of one |",
        "|---|---|---|---|---|",
    ]
    rows = [
        f"| {name}, {weather} | {growth.lives} | {growth.middle:.1f} | {growth.greatest:.1f} | {growth.error:.1f} |"
        for weather, grown in (("with faults", report.growth), ("without", report.calm_growth))
        for name, growth in grown.items()
    ]
    return "\n".join([*lines, *rows])


if __name__ == "__main__":
    sys.exit(main())
