"""Peers that die and come back all the time: what it costs in loss and in time, over paired seeds.

    python benchmarks/churn.py [--share 0.3] [--rounds 20] [--seeds 3] [--peers 8] [--virtual] [--json]

In every round `share` of the peers are killed with SIGKILL, daemon and trainer, at a moment of the round that a seed
draws, and those of the round before are started again in their folders. After `rounds` rounds all come back, and must
agree. Then the same run without deaths, until as many tokens are in its committed rounds: the losses are compared
there, on the same held-out text. `seconds_lost_per_death`: the difference of the two runs' lengths for these tokens, by
deaths; all peers share this machine's cores, so a death also makes the others faster. `longest_standstill`: seconds
that a living peer went without a round, from its first answer on, once the run had begun.

Real processes take about 7 minutes a seed on two cores. `--virtual`: the simulator instead, with real gradients and
round machines, under a virtual clock; there a peer that comes back has lost its disk too, and fewer than half die in
a round (`deaths` is then what is to be expected).
Exit code 1 where a run does not end in agreement, a peer stands still for a minute, or the mean loss is worse by more
than 1 % (2 % from a share of one half on).
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch

from benchmarks.endurance.run_control import has_reached, make_manifest, run_until, wait_for_agreement
from benchmarks.endurance.run_observer import Curve, RunObserver, Standstill, loss_at
from node.commands.up.peer_process import PeerProcess
from node.data import open_corpus
from node.from_manifest import build_program
from node.simulation.comparison import run_simulation
from node.simulation.config import SimulationConfig
from node.simulation.measurement import Evaluator
from tests.swarm.process_swarm import ProcessSwarm, running_swarm

STUCK_SECONDS = 60.0
INNER_STEPS = 150
VIRTUAL_STEPS = 25  # a round: the virtual peers take turns on one core
MEGABITS, LATENCY = 20, 0.05


@dataclass
class Report:
    """`undisturbed` and `churned`: validation losses at equal tokens, by seed."""

    undisturbed: dict[int, float] = field(default_factory=dict)
    churned: dict[int, float] = field(default_factory=dict)
    digests_equal: bool = True
    deaths: int = 0
    seconds_lost_per_death: float = 0.0
    longest_standstill: float = 0.0

    @property
    def excess(self) -> float:
        return statistics.fmean(self.churned.values()) / statistics.fmean(self.undisturbed.values()) - 1


@dataclass(frozen=True)
class Flight:
    """The result of one run."""

    curve: Curve
    seconds: float
    deaths: int
    agreed: bool
    longest_standstill: float


class Deaths:
    """Draws who dies when. With every new round those of the last one come back."""

    def __init__(self, swarm: ProcessSwarm, watch: RunObserver, share: float, seed: int) -> None:
        self._swarm = swarm
        self._watch = watch
        self._share = share
        self._random = random.Random(seed)
        self._doomed: list[tuple[float, PeerProcess]] = []
        self._dead: list[PeerProcess] = []
        self._round = 0
        self._round_began = time.monotonic()
        self.count = 0

    def go_on(self, now: float) -> None:
        if self._watch.round > self._round:
            length, self._round, self._round_began = now - self._round_began, self._watch.round, now
            self.revive()
            self._doom(now, length)
        for due, victim in list(self._doomed):
            if due <= now:
                self._doomed.remove((due, victim))
                self._kill(victim)

    def revive(self) -> None:
        """All who are dead."""
        self._doomed.clear()
        living = [peer for peer in self._swarm.peers if peer.is_running and peer.addresses()]
        introducers = [address for peer in living for address in peer.addresses()[:1]]
        for peer in self._dead:
            self._watch.reset_standstill(peer.name)
            peer.start(introducers)
        self._dead.clear()

    def _doom(self, now: float, length: float) -> None:
        at_work = [peer for peer in self._swarm.peers if peer.is_running and peer.status]
        wanted = int(self._share * len(self._swarm.peers) + self._random.random())
        for victim in self._random.sample(at_work, min(wanted, len(at_work) - 1)):
            self._doomed.append((now + length * self._random.random(), victim))

    def _kill(self, victim: PeerProcess) -> None:
        victim.kill()
        self._watch.reset_standstill(victim.name)
        self._dead.append(victim)
        self.count += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--share", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--virtual", action="store_true")
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    measured = virtual if words.virtual else real
    report = measured(words.share, words.rounds, words.seeds, words.peers)
    print(json.dumps(asdict(report)) if words.json else table(report))
    allowed = 0.02 if words.share >= 0.5 else 0.01
    stuck = report.longest_standstill > STUCK_SECONDS
    return int(stuck or not report.digests_equal or report.excess > allowed)


def real(share: float, rounds: int, seeds: int, peers: int) -> Report:
    report, lost = Report(), 0.0
    for seed in range(seeds):
        churned = fly(seed, peers, share, lambda watch: watch.round >= rounds and bool(watch.curve))
        tokens, report.churned[seed] = churned.curve[-1]
        calm = fly(seed, peers, 0.0, partial(has_reached, tokens))
        report.undisturbed[seed] = loss_at(calm.curve, tokens)
        report.deaths += churned.deaths
        report.digests_equal &= churned.agreed and calm.agreed
        report.longest_standstill = max(report.longest_standstill, churned.longest_standstill)
        lost += churned.seconds - calm.seconds
        print(f"  seed {seed}: {report}", file=sys.stderr)
    report.seconds_lost_per_death = lost / max(1, report.deaths)
    return report


def fly(seed: int, peers: int, share: float, is_done: Callable[[RunObserver], bool]) -> Flight:
    """One run of real processes; its seconds count from the first round on."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mm", dir="/tmp"))
        swarm = stack.enter_context(running_swarm(Path(folder), make_manifest(seed, INNER_STEPS, peers), peers))
        watch = RunObserver(swarm)
        deaths = Deaths(swarm, watch, share, seed)
        swarm.start()
        run_until(watch, lambda: watch.round >= 1)
        watch.standstill = Standstill()  # before, all have waited for the slowest start
        began = time.monotonic()
        run_until(watch, lambda: is_done(watch), deaths.go_on)
        seconds, curve = time.monotonic() - began, watch.curve
        deaths.revive()
        return Flight(curve, seconds, deaths.count, wait_for_agreement(swarm), watch.standstill.worst)


def virtual(share: float, rounds: int, seeds: int, peers: int) -> Report:
    """All virtual peers of a run end on one chain, or it does not end."""
    torch.set_num_threads(1)
    report, lost = Report(), 0.0
    for seed in range(seeds):
        manifest = make_manifest(seed, VIRTUAL_STEPS, peers)
        corpus = open_corpus(manifest.data, Path())
        outcomes = []
        for churn in (0.0, share):
            links = (MEGABITS * 1e6 / 8,) * peers
            steps = rounds * VIRTUAL_STEPS
            setting = SimulationConfig(manifest, Path(), peers, steps, (1.0,) * peers, links, LATENCY, churn)
            examiner = Evaluator(setting, corpus)
            outcomes.append(run_simulation(setting, build_program(manifest).method, corpus, examiner, 1, lambda: None))
        calm, churned = outcomes
        report.undisturbed[seed], report.churned[seed] = calm.validation_loss, churned.validation_loss
        report.deaths += round(min(share * peers, (peers - 1) // 2) * churned.rounds)
        lost += churned.virtual_seconds - calm.virtual_seconds
        print(f"  seed {seed}: {report}", file=sys.stderr)
    report.seconds_lost_per_death = lost / max(1, report.deaths)
    return report


def table(report: Report) -> str:
    seeds = list(report.churned)
    lines = ["| validation loss | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean |"]
    lines.append("|---" * (len(seeds) + 2) + "|")
    for name, losses in (("undisturbed", report.undisturbed), ("churned", report.churned)):
        shown = " | ".join(f"{losses[seed]:.3f}" for seed in seeds)
        lines.append(f"| {name} | {shown} | {statistics.fmean(losses.values()):.3f} |")
    lines += [
        "",
        f"{report.excess:+.2%}; {report.deaths} deaths, {report.seconds_lost_per_death:.2f} s lost with each; "
        f"digests {'equal' if report.digests_equal else 'DIFFER'}; nobody without a round for more than "
        f"{report.longest_standstill:.0f} s",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
