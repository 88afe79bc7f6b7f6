"""Small simulated swarms for tests: a tiny model on synthetic text."""

import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from node.data import Corpus
from node.data.corpus import TokenArray
from node.simulation.config import SimulationConfig
from node.simulation.measurement import CurveRecorder, Evaluator
from node.simulation.swarm import VirtualSwarm
from optim.compose import compose
from optim.method import Method
from optim.options import Scalar
from protocol.manifest.model import ModelSection
from protocol.manifest.run import Manifest
from protocol.manifest.sections import DataSection, MembershipSection, RoundSection, RunSection, TrainSection
from protocol.manifest.sections import MethodSection as MethodTable

torch.set_num_threads(1)
MODEL = ModelSection(vocabulary=32, width=16, layers=1, heads=2, hidden=40, context=16)
BATCH = 64
WORDS = [bytes(random.Random(number).randbytes(5)) for number in range(40)]
Tables = Mapping[str, Mapping[str, Scalar]]


def make_corpus() -> Corpus:
    chance = random.Random(0)
    text = b" ".join(chance.choice(WORDS) for _ in range(4000))
    tokens = np.frombuffer(text, np.uint8) % 32
    return Corpus.of(TokenArray([tokens[:20_000]]), TokenArray([tokens[20_000:]]), 32)


def make_config(
    peers: int,
    steps: int,
    *,
    seed: int = 0,
    speeds: tuple[float, ...] | None = None,
    bandwidth: float = 1e7,
    churn: float = 0.0,
    learning_rate: float = 5e-3,
    model: ModelSection = MODEL,
) -> SimulationConfig:
    manifest = Manifest(
        run=RunSection(name="virtual", seed=seed),
        model=model,
        data=DataSection(source="text"),
        train=TrainSection(batch_tokens=BATCH, learning_rate=learning_rate, warmup_steps=3),
        method=MethodTable(recipe="diloco"),
        round=RoundSection(grace=2.0, leader_timeout=2.0, exchange_timeout=20.0, parts=4),
        membership=MembershipSection(heartbeat=1.0, expiry=6.0),
    )
    return SimulationConfig(manifest, Path(), peers, steps, speeds or (1.0,) * peers, (bandwidth,) * peers, 0.05, churn)


def make_method(recipe: str, period: int, overrides: Tables | None = None) -> Method:
    tables = {part: dict(table) for part, table in (overrides or {}).items()}
    tables["schedule"] = {"inner_steps": period, **tables.get("schedule", {})}
    return compose(recipe, tables)


def run_to_target(config: SimulationConfig, composed: Method, points: int = 1) -> tuple[VirtualSwarm, CurveRecorder]:
    """Run the swarm to its target; returns it and the recorded curve."""
    text = make_corpus()
    recorder = CurveRecorder(Evaluator(config, text), points)
    swarm = VirtualSwarm(config, composed, text, recorder.on_new_head, lambda: None)
    swarm.run()
    return swarm, recorder
