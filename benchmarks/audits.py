"""Measure whether audits find the peers that lie about their work, and accuse nobody else.

    python benchmarks/audits.py [--honest 10000] [--seeds 20] [--json]

Virtual peers train a tiny model. First, every contribution of honest peers is repeated until there are as many as
`--honest` says. Then, for each kind of lie and each seed, one peer of five lies for 60 rounds, and 5 % of the
contributions are audited. JSON: `honest`: contributions repeated, and peers accused or struck; `lies`: by kind, the
share of the liars that were found within 60 rounds, the mean round, and the honest peers accused; `expected`: the share
that the draw alone gives.
"""

import argparse
import json
import random
from pathlib import Path

import numpy as np
import torch

from node.data import Corpus
from node.data.corpus import TokenArray
from node.simulation.adversary import Adversaries, LieKind
from node.simulation.config import SimulationConfig
from node.simulation.swarm import VirtualSwarm
from optim.compose import compose
from protocol.manifest.model import ModelSection
from protocol.manifest.run import Manifest
from protocol.manifest.sections import AuditSection, DataSection, MethodSection, RoundSection, RunSection, TrainSection

LIES: tuple[LieKind, ...] = ("fewer-steps", "wrong-data", "stale-replay", "zero", "random")
MODEL = ModelSection(vocabulary=32, width=16, layers=1, heads=2, hidden=40, context=16)
BATCH, PEERS, STEPS_PER_ROUND, ROUNDS, SHARE = 64, 5, 2, 60, 0.05
METHOD = compose("sparseloco", {"schedule": {"inner_steps": STEPS_PER_ROUND}})


def make_corpus() -> Corpus:
    chance = random.Random(0)
    words = [bytes(chance.randbytes(5)) for _ in range(40)]
    tokens = np.frombuffer(b" ".join(chance.choice(words) for _ in range(4000)), np.uint8) % 32
    return Corpus.of(TokenArray([tokens[:20_000]]), TokenArray([tokens[20_000:]]), 32)


def run_swarm(share: float, rounds: int, seed: int, lie: LieKind | None = None) -> VirtualSwarm:
    """Run a swarm for so many rounds, in which the first peer may lie."""
    manifest = Manifest(
        run=RunSection(name="audits", seed=seed),
        model=MODEL,
        data=DataSection(source="text"),
        train=TrainSection(batch_tokens=BATCH, learning_rate=5e-3, warmup_steps=3),
        method=MethodSection(recipe="sparseloco"),
        round=RoundSection(grace=2.0, leader_timeout=2.0, exchange_timeout=20.0),
        audits=AuditSection(share=share),
    )
    liars = None if lie is None else Adversaries(1 / PEERS, lie)
    config = SimulationConfig(
        manifest, Path(), PEERS, rounds * STEPS_PER_ROUND, (1.0,) * PEERS, (1e7,) * PEERS, 0.05, adversaries=liars
    )
    swarm = VirtualSwarm(config, METHOD, make_corpus(), lambda *_: None, lambda: None)
    swarm.run()
    return swarm


def measure_honest(count: int) -> dict[str, int]:
    """Repeat so many contributions of honest peers."""
    repeated, accused, struck, seed = 0, 0, 0, 0
    while repeated < count:
        audits = run_swarm(1.0, min(200, -(-(count - repeated) // PEERS)), seed).audits
        assert audits is not None
        repeated += sum(audits.verdicts.values())
        accused += len(audits.caught) + audits.verdicts["different"]
        struck += sum(audits.struck.values())
        seed += 1
    return {"repeated": repeated, "accused": accused, "struck": struck}


def measure_lie(lie: LieKind, seeds: int) -> dict[str, float]:
    """Let one peer of each swarm lie, and count the swarms that find it."""
    found, accused = list[int](), 0
    for seed in range(seeds):
        swarm = run_swarm(SHARE, ROUNDS, seed, lie)
        assert swarm.audits is not None
        by_slot = {peer.peer_id: peer.slot for peer in swarm.peers.values()}
        found += [number for peer, number in swarm.audits.caught.items() if by_slot[peer] == 0]
        accused += sum(by_slot[peer] != 0 for peer in swarm.audits.caught)
    mean = float(np.mean(found)) if found else float("nan")
    return {"found": len(found) / seeds, "mean round": round(mean, 1), "honest accused": accused}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--honest", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    expected = round(1 - (1 - SHARE) ** ROUNDS, 3)
    honest = measure_honest(options.honest) if options.honest else {}
    lies = {lie: measure_lie(lie, options.seeds) for lie in LIES}
    if options.json:
        print(json.dumps({"expected": expected, "honest": honest, "lies": lies}, indent=1))
        return
    print("honest:", ", ".join(f"{name} {value}" for name, value in honest.items()))
    for lie, row in lies.items():
        print(f"{lie:14}", ", ".join(f"{name} {value:g}" for name, value in row.items()))
    print(f"expected from the draw: {expected:.1%} found")


if __name__ == "__main__":
    main()
