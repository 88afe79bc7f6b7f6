"""Measure the loss that rounds of few peers cost, and how much of it a step in proportion to them saves.

Eight peers train by turns on one core, with the trainer's own state and the run's codec, merger and update, without a
network. Before every round each peer may go away for one to three rounds, so that some rounds are left to one or two.
Three runs from the same weights, until as many tokens are in their rounds: nobody ever away; every round a whole step,
however few were there (`update.shorten` = false); and each by its share of what is usual. The loss on held-out text is
taken after every third round; of the last quarter of the tokens the table has the mean and the greatest.

    python benchmarks/absence.py [--recipe diloco] [--rounds 60] [--away 0.28] [--seed 5] [--json]

`--rounds`: of eight peers, so many tokens. With 60 of a hundred steps it takes 25 minutes on two cores. Exit code 1
where steps in proportion are not better than whole ones.
"""

import argparse
import json
import multiprocessing
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.endurance.run_control import make_manifest
from node.data import open_corpus, validation_batches
from node.data.batches import VALIDATION_TOKENS
from node.from_manifest import build_program
from node.model import build_model, initial_weights
from node.simulation.virtual.trainer import VirtualTrainer
from node.trainer.inner_step import validation_loss
from node.trainer.ipc.channel import ContributionOutcome
from optim.compose import compose
from optim.exchange import ContributionEncoder
from optim.method import Method
from protocol.manifest.run import Manifest
from tests.optim.fake_peers import FakePeer

PEERS = 8
LONGEST = 3  # rounds that a peer is away
LOOK_ROUNDS = 3
TAIL = 0.25  # of the tokens


@dataclass(frozen=True)
class Run:
    """`rounds`: so many had the tokens. `loss` and `worst`: over the last quarter of them."""

    rounds: int
    loss: float
    worst: float


Report = dict[str, Run]


class Peers:
    """All of them, and the state that they agree on."""

    def __init__(self, manifest: Manifest, method: Method) -> None:
        corpus, weights = open_corpus(manifest.data, Path()), initial_weights(manifest.model, manifest.run.seed)
        self._program = build_program(manifest, method)
        self._agreed = FakePeer(self._program)
        self._round = 0
        self._agreed.anchor = weights
        self._learners = [
            VirtualTrainer(
                build_model(manifest.model),
                manifest,
                self._program,
                corpus,
                ContributionEncoder(self._program),
                str(i),
            )
            for i in range(PEERS)
        ]
        for learner in self._learners:
            learner.start(0, [weights])
        self._examiner = build_model(manifest.model)
        self._held_out = validation_batches(corpus, manifest.model.context, VALIDATION_TOKENS)

    def round(self, present: Sequence[int]) -> None:
        learners = [self._learners[index] for index in present]
        self._tell(learners, "none")
        for learner in learners:
            for _ in range(self._program.plan(self._round).steps):
                learner.step()
        messages = [learner.make_contribution()[1] for learner in learners]
        self._agreed.apply(self._round, messages, [1.0] * len(messages))
        self._round += 1
        self._tell(learners, "included")

    def _tell(self, learners: Sequence[VirtualTrainer], fate: ContributionOutcome) -> None:
        for learner in learners:
            learner.apply_anchor(self._round, [self._agreed.anchor], fate, (), lambda parts: [])

    def loss(self) -> float:
        return validation_loss(self._examiner, self._agreed.anchor, self._held_out)[0]


def attendance(away: float, seed: int) -> Iterator[list[int]]:
    """Yield the peers that are present, round by round; at least one."""
    draw, left = random.Random(seed), [0] * PEERS
    while True:
        left = [rest - 1 if rest else (draw.random() < away) * draw.randint(1, LONGEST) for rest in left]
        if present := [index for index, rest in enumerate(left) if not rest]:
            yield present


def run(recipe: str, seed: int, rounds: int, away: float, shorten: bool) -> Run:
    torch.set_num_threads(1)
    method = compose(recipe, {"update": {"shorten": shorten}})
    peers = Peers(make_manifest(seed, method.schedule.inner_steps, PEERS), method)
    tokens, curve = 0, list[tuple[int, float]]()
    for number, present in enumerate(attendance(away, seed), start=1):
        peers.round(present)
        tokens += len(present)
        if number % LOOK_ROUNDS == 0:
            curve.append((tokens, peers.loss()))
            print(f"  {away=} {shorten=} round {number}: {curve[-1]}", file=sys.stderr)
        if tokens >= rounds * PEERS:
            last = [loss for count, loss in curve if count >= (1 - TAIL) * rounds * PEERS]
            return Run(number, statistics.fmean(last), max(last))
    raise AssertionError("attendance never ends")


def measure(recipe: str, seed: int, rounds: int, away: float) -> Report:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        whole, share = (pool.submit(run, recipe, seed, rounds, away, shorten) for shorten in (False, True))
        calm = pool.submit(run, recipe, seed, rounds, 0.0, True)
        return {"nobody away": calm.result(), "whole steps": whole.result(), "by share": share.result()}


def table(report: Report) -> str:
    calm = report["nobody away"]
    lines = ["| | rounds | loss | worst |", "|---|---|---|---|"]
    for name, found in report.items():
        more = f"{found.loss / calm.loss - 1:+.1%}"
        lines.append(f"| {name} | {found.rounds} | {found.loss:.3f} ({more}) | {found.worst:.3f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="diloco")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--away", type=float, default=0.28)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args(arguments)
    report = measure(words.recipe, words.seed, words.rounds, words.away)
    shown = {name: asdict(found) for name, found in report.items()}
    print(json.dumps(shown) if words.json else table(report))
    return int(report["by share"].loss >= report["whole steps"].loss)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
