"""Kill processes of an exact pipeline again and again, and compare its weights with those of one process, bit for bit.

    python -m benchmarks.exact [RUN.toml] [--kills 30] [--seconds 6] [--nodes 0.2] [--seed 0] [--json]

Runs four real peers with `murmur up`. From the first round on it kills a random process about every `--seconds`: a
trainer, or with the probability `--nodes` a whole peer, which `murmur up` restarts. Exit code 1 unless every value of
all stages is equal.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.pipelining.exact_reference import SingleProcess, read_stages
from node.process import python_environment
from protocol.manifest import load_manifest

RUN = Path(__file__).parent.parent / "tests" / "swarm" / "exact.toml"
PEERS = 4
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Result:
    """`kills`: by SIGKILL; `steps`: that counted, of `rounds`; `differing`: values of all peers' weights."""

    kills: int
    killed_nodes: int
    rounds: int
    steps: int
    void_rounds: int
    differing: int
    bit_equal: bool
    seconds: float


def children_of(pid: int) -> list[int]:
    """Return the running child processes of a process."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(entry.parent.name))
    return found


def is_trainer(pid: int) -> bool:
    try:
        return b"node.trainer" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


class Killer:
    """Kills processes below `murmur up`, as a seed says."""

    def __init__(self, up: int, most: int, node_share: float, seed: int) -> None:
        self._up = up
        self._most = most
        self._node_share = node_share
        self._chance = random.Random(seed)
        self.kills = self.killed_nodes = 0

    def strike(self) -> None:
        """Kill a trainer or a peer, if there are any kills left."""
        nodes = [pid for pid in children_of(self._up) if any(map(is_trainer, children_of(pid)))]
        if self.kills >= self._most or not nodes:
            return
        node = self._chance.choice(nodes)
        kills_node = self._chance.random() < self._node_share and len(nodes) == PEERS
        victim = node if kills_node else next(filter(is_trainer, children_of(node)), None)
        if victim is not None:
            os.kill(victim, signal.SIGKILL)
            self.kills += 1
            self.killed_nodes += kills_node


def has_begun(folder: Path) -> bool:
    """Return whether a peer has made a round."""
    return any(": " in line and " contribution" in line for log in folder.glob("peer-*/log") for line in log.open())


def run_swarm(run: Path, folder: Path, given: argparse.Namespace) -> Killer:
    """Run all peers to the end, and kill processes meanwhile."""
    words = [sys.executable, "-m", "node.cli", "up", str(run), "--dir", str(folder), "--peers", str(PEERS), "--json"]
    with (folder.parent / "up.log").open("w") as log:
        up = subprocess.Popen(words, env=python_environment(), stdout=log, stderr=log)
    killer = Killer(up.pid, given.kills, given.nodes, given.seed)
    chance, next_kill = random.Random(given.seed + 1), 0.0
    try:
        while up.poll() is None:
            time.sleep(POLL_SECONDS)
            if time.monotonic() > next_kill and has_begun(folder):
                killer.strike()
                next_kill = time.monotonic() + given.seconds * chance.uniform(0.5, 1.5)
    finally:
        up.terminate()
        up.wait(60)
    return killer


def compare(folder: Path) -> tuple[int, int, int]:
    """Return rounds, steps and values that differ from one process."""
    stages, manifest = read_stages(folder), load_manifest(folder / "run.toml")
    newest = max(stage.steps for stage in stages)
    weights = SingleProcess(manifest, folder).run(newest)
    finished = [stage for stage in stages if stage.steps == newest]
    differing = sum(int((stage.anchor != weights[stage.stage]).sum()) for stage in finished)
    if {stage.stage for stage in finished} != set(range(manifest.pipeline.stages)):
        differing += sum(map(torch.numel, weights))  # a stage has not finished
    return manifest.target.rounds or 0, newest, differing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, default=RUN)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--nodes", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="murmur-exact-") as base:
        folder = Path(base) / "swarm"
        killer = run_swarm(given.run, folder, given)
        rounds, steps, differing = compare(folder)
    counts = killer.kills, killer.killed_nodes, rounds, steps, rounds - steps
    result = Result(*counts, differing, differing == 0, round(time.monotonic() - began, 1))
    print(json.dumps(asdict(result)) if given.json else result)
    return 0 if result.bit_equal else 1


if __name__ == "__main__":
    sys.exit(main())
