"""How far the simulator goes: many virtual peers with a model of some 10,000 parameters, in one process.

    python benchmarks/scale.py [--peers 1000] [--rounds 20] [--recipe averaging] [--json]

Every peer takes real inner steps, one a round; messages, rounds and outer updates are real, time and links virtual.
Peers differ in speed by up to a fifth. Prints the processor's seconds and the round machines' own share of them.
Takes about 4 minutes on one core. Exit code 1 where a run of 1,000 peers and 20 rounds takes longer than 5.
"""

import argparse
import json
import resource
import sys
import time
from pathlib import Path

import torch

from node.data import open_corpus
from node.simulation.config import SimulationConfig
from node.simulation.swarm import VirtualSwarm
from node.simulation.virtual.peer import VirtualPeer
from optim.compose import compose
from protocol.manifest.model import ModelSection
from protocol.manifest.run import Manifest
from protocol.manifest.sections import DataSection, MethodSection, RoundSection, RunSection, TrainSection

MODEL = ModelSection(width=20, layers=1, heads=2, hidden=64, context=16)
BATCH_TOKENS = 16
LIMIT_SECONDS = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--recipe", default="averaging")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure(options.peers, options.rounds, options.recipe)
    print(json.dumps(figures) if options.json else "\n".join(f"{name:>18} {value}" for name, value in figures.items()))
    return int(options.peers >= 1000 and options.rounds >= 20 and figures["seconds"] > LIMIT_SECONDS)


def measure(peers: int, rounds: int, recipe: str) -> dict[str, float]:
    begun, busy = time.monotonic(), time.process_time()
    method = compose(recipe, {"schedule": {"inner_steps": 1}})
    corpus = open_corpus(DataSection(source="python-stdlib"), Path())
    swarm = VirtualSwarm(setting(peers, rounds, recipe), method, corpus, progress, lambda: None)
    swarm.run()
    seconds = time.process_time() - busy
    return {
        "peers": peers,
        "rounds": len(swarm.accounting.commits),
        "parameters": swarm.numel,
        "seconds": round(time.monotonic() - begun, 1),
        "processor_seconds": round(seconds, 1),
        "logic_seconds": round(swarm.accounting.logic_seconds, 1),
        "logic_share": round(swarm.accounting.logic_seconds / seconds, 3),
        "statements_mb": round(sum(swarm.network.message_bytes) / 1e6 / len(swarm.accounting.commits), 1),
        "memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def setting(peers: int, rounds: int, recipe: str) -> SimulationConfig:
    manifest = Manifest(
        run=RunSection(name="scale"),
        model=MODEL,
        data=DataSection(source="python-stdlib"),
        train=TrainSection(batch_tokens=BATCH_TOKENS, learning_rate=3e-3),
        method=MethodSection(recipe=recipe),
        round=RoundSection(grace=5.0, leader_timeout=5.0, exchange_timeout=60.0, parts=8),
    )
    speeds = tuple(1 + 0.2 * slot / peers for slot in range(peers))
    return SimulationConfig(manifest, Path(), peers, rounds, speeds, (12.5e6,) * peers, latency=0.05)


def progress(swarm: VirtualSwarm, peer: VirtualPeer) -> None:
    print(f"round {peer.chain.round} at {time.process_time():.0f} s", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
