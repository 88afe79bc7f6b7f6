"""Does exchanging help? The demo's model, averaged every 20 steps, against peers that train alone, at equal inner steps
a peer, over seeds.

    python benchmarks/demo.py [--seeds 3] [--rounds 12] [--peers 3] [--json]

For each seed the same run is trained three ways, by real processes: `swarm` (all peers exchange), `never_exchanging`
(as many peers, each on its own; the mean of their losses) and `alone` (the first of those). All validate on the same
held-out text. Takes about 4 minutes a seed for 12 rounds on two cores. Exit code 1 if the swarm is not the best
for every seed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from protocol.manifest.reading import load_manifest
from protocol.manifest.run import Manifest
from protocol.manifest.sections import MethodSection

MANIFEST = Path(__file__).parent.parent / "configs" / "demo.toml"
RUN_SECONDS = 3600


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--peers", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    losses: dict[str, dict[int, float]] = {"swarm": {}, "alone": {}, "never_exchanging": {}}
    for seed in range(options.seeds):
        losses["swarm"][seed] = train(seed, options.rounds, options.peers)
        single = [train(seed, options.rounds, peers=1) for _ in range(options.peers)]
        losses["alone"][seed] = single[0]
        losses["never_exchanging"][seed] = statistics.fmean(single)
        print(line(seed, losses), file=sys.stderr)
    print(json.dumps(losses) if options.json else table(losses))
    rivals = [losses["alone"], losses["never_exchanging"]]
    return int(any(losses["swarm"][seed] >= rival[seed] for rival in rivals for seed in rival))


def train(seed: int, rounds: int, peers: int) -> float:
    """Final validation loss of a swarm of that size."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run.toml"
        run.write_text(averaging().to_toml())
        options = [
            *("--peers", str(peers), "--rounds", str(rounds), "--seed", str(seed)),
            *("--dir", f"{folder}/swarm", "--no-drill", "--json"),
        ]
        command = [sys.executable, "-P", "-m", "node.cli", "up", str(run), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS)
    if done.returncode:
        raise SystemExit(f"a run ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return float(json.loads(done.stdout)["validation_loss"])


def averaging() -> Manifest:
    """The plainest recipe: what the figures say is of exchanging, not of a method."""
    method = MethodSection(recipe="averaging", schedule={"inner_steps": 20})
    return load_manifest(MANIFEST).model_copy(update={"method": method})


def line(seed: int, losses: dict[str, dict[int, float]]) -> str:
    return f"seed {seed}: " + ", ".join(f"{name} {by_seed[seed]:.3f}" for name, by_seed in losses.items())


def table(losses: dict[str, dict[int, float]]) -> str:
    seeds = " | ".join(f"seed {seed}" for seed in losses["swarm"])
    rows = ["validation loss, nats a byte", "", f"| | {seeds} | mean |"]
    rows.append("|---" * (len(losses["swarm"]) + 2) + "|")
    for name, by_seed in losses.items():
        values = " | ".join(f"{loss:.3f}" for loss in by_seed.values())
        rows.append(f"| {name.replace('_', ' ')} | {values} | {statistics.fmean(by_seed.values()):.3f} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
