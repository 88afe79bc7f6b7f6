"""Which recipe, period and outer rate a short run should use, at how many bytes.

Trains virtual peers of a manifest's model on its data in one process, with the senders, mergers and updates that real
peers use, and prints for each setting the validation loss of the final anchor and the bytes a peer sends beside
per-step all-reduce of fp32 gradients (a ring: 2 (P - 1) / P * 4 bytes a parameter and step). Three baselines:
all-reduce itself, one peer alone, and peers that never exchange.

    python benchmarks/method_choice.py [--manifest configs/demo.toml] [--small] [--steps 600] [--only NAME] [--json]
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from node.data import Batches, Corpus, open_source, validation_batches
from node.model import Llama, initial_weights
from node.program import program_of
from node.trainer.inner import InnerOptimizer
from optim.exchange import Merger, Sender
from optim.inner.adamw import AdamW
from optim.inner.inner import WEIGHTS
from optim.method import Method
from optim.parts import Scalar
from optim.recipes import compose
from optim.signals import Progress
from protocol.manifest import Manifest, load_manifest

VALIDATION_TOKENS = 32_768
Overrides = Mapping[str, Mapping[str, Scalar]]


@dataclass(frozen=True)
class Setting:
    """`delay`: inner steps a peer takes between sending its message and adopting the result."""

    recipe: str
    overrides: Overrides
    delay: int = 0

    @property
    def name(self) -> str:
        options = [f"{key}={value}" for table in self.overrides.values() for key, value in table.items()]
        return " ".join([self.recipe, *options, *([f"delay={self.delay}"] if self.delay else [])])


@dataclass(frozen=True)
class Outcome:
    """`bytes_ratio`: bytes of per-step all-reduce for each byte that a peer sends; absent where nothing is sent."""

    name: str
    validation_loss: float
    bytes_ratio: float | None
    seconds: float


def grid() -> list[Setting]:
    """What is compared: period, density and outer rate, near and above fifty times fewer bytes than all-reduce."""
    return [
        *(averaging(steps) for steps in (15, 30)),
        *(sparse(steps, k, 1.0) for steps, k in ((1, 64), (2, 128), (3, 256), (5, 512))),
        *(diloco(15, rate, momentum) for rate, momentum in ((0.7, 0.5), (1.0, 0.3), (0.7, 0.9))),
        *(sparse(steps, k, 0.95) for steps, k in ((2, 128), (5, 512), (30, 64))),
        averaging(15, delay=3),
        diloco(30, 0.7, 0.5),
    ]


def averaging(steps: int, delay: int = 0) -> Setting:
    return Setting("averaging", {"schedule": {"inner_steps": steps}}, delay)


def diloco(steps: int, rate: float, momentum: float) -> Setting:
    update: dict[str, Scalar] = {"learning_rate": rate, "momentum": momentum}
    return Setting("diloco", {"schedule": {"inner_steps": steps}, "update": update})


def sparse(steps: int, k: int, decay: float) -> Setting:
    overrides: Overrides = {"schedule": {"inner_steps": steps}, "codec": {"k": k}, "feedback": {"decay": decay}}
    return Setting("sparseloco", overrides)


class Trial:
    """What all settings have in common: the run, its text, its first weights."""

    def __init__(self, manifest: Manifest, corpus: Corpus, peers: int, steps: int, seed: int) -> None:
        self.manifest, self.corpus, self.peers, self.steps, self.seed = manifest, corpus, peers, steps, seed
        self.initial = initial_weights(manifest.model, seed)
        self._held_out = validation_batches(corpus, manifest.model.context, VALIDATION_TOKENS)
        self._judge = Llama(manifest.model)

    def loss(self, weights: torch.Tensor) -> float:
        """Nats a token on the held-out text."""
        self._judge.load_flat(weights)
        with torch.no_grad():
            losses = [(float(self._judge(held[:, :-1], held[:, 1:])), len(held)) for held in self._held_out]
        return sum(loss * count for loss, count in losses) / sum(count for _, count in losses)

    def all_reduce_bytes(self) -> float:
        """What each peer sends in the whole trial."""
        return 8 * self.initial.numel() * self.steps * (self.peers - 1) / self.peers


class Peer:
    """A model in training with its own text, and what its outer method keeps."""

    def __init__(self, trial: Trial, number: int) -> None:
        self._model = Llama(trial.manifest.model)
        self._model.load_flat(trial.initial)
        self._inner = InnerOptimizer(self._model, trial.manifest.train, AdamW())
        self._sequences = trial.manifest.train.batch_tokens // trial.manifest.model.context
        self._batches = Batches(trial.corpus, trial.manifest.model.context, trial.seed, f"peer {number}")
        self.weights = self._model.flat.detach()
        self.reference, self.residual = trial.initial.clone(), torch.zeros_like(trial.initial)

    def gradient(self) -> torch.Tensor:
        windows = self._batches.next(self._sequences)
        self._inner.clear_gradient()
        self._model(windows[:, :-1], windows[:, 1:]).backward()
        gradient = self._model.flat.grad
        assert gradient is not None
        return gradient

    def train(self, step: int) -> None:
        self.gradient()
        self._inner.step(step)

    def follow(self, step: int, gradients: Sequence[torch.Tensor]) -> None:
        """A step by the mean of all peers' gradients in place of our own."""
        self._model.flat.grad = torch.stack(tuple(gradients)).mean(0)
        self._inner.step(step)


class Swarm:
    """The peers and the anchor they hold alike."""

    def __init__(self, trial: Trial, method: Method) -> None:
        self.method, self.program = method, program_of(trial.manifest, method)
        self.peers = [Peer(trial, number) for number in range(trial.peers)]
        self.anchor = trial.initial.clone()
        self._slots = {name: torch.zeros_like(trial.initial) for name in method.slots}
        self._sender, self._merger = Sender(self.program), Merger(self.program)
        self._round, self.bytes_sent = 0, 0.0

    def exchange(self) -> None:
        """One round in which everyone is included; the anchor moves, the peers have not adopted it yet."""
        messages = []
        for peer in self.peers:
            live, reference = {WEIGHTS: peer.weights}, {WEIGHTS: peer.reference}
            progress = Progress(live, reference, {WEIGHTS: self.anchor}, {}, self.method.schedule.inner_steps)
            delta = self.method.signal.measure(progress)
            messages.append(self._sender.message(self._round, delta, peer.residual))
            peer.reference.copy_(peer.weights)
        plan = self.program.plan(self._round)
        self.program.apply(plan, self.anchor, self._slots, self._merged(messages), 1.0)
        self._round += 1

    def adopt(self) -> None:
        for peer in self.peers:
            peer.weights += self.anchor - peer.reference
            peer.reference.copy_(self.anchor)

    def _merged(self, messages: Sequence[Sequence[bytes]]) -> torch.Tensor:
        count, weights = len(messages), [1.0] * len(messages)
        sizes = sum(len(part) for message in messages for part in message) / count
        if self.method.topology.kind == "gather":
            self.bytes_sent += sizes * (count - 1)
            return self._merger.merge(self._round, [message[0] for message in messages], weights)
        # A peer sends every part but its own, and the part it reduced to everyone else.
        self.bytes_sent += 2 * sizes * (count - 1) / count
        reduced = [
            self._merger.reduce_part(self._round, part, [message[part] for message in messages], weights)
            for part in range(len(messages[0]))
        ]
        return self._merger.merge(self._round, reduced, ())


def run(trial: Trial, setting: Setting) -> Outcome:
    started = time.monotonic()
    swarm = Swarm(trial, compose(setting.recipe, setting.overrides))
    period = swarm.method.schedule.inner_steps
    for step in range(trial.steps):
        for peer in swarm.peers:
            peer.train(step)
        if (step + 1) % period == 0:
            swarm.exchange()
        if step + 1 >= period and (step + 1 - setting.delay) % period == 0:
            swarm.adopt()
    ratio = trial.all_reduce_bytes() / swarm.bytes_sent
    return Outcome(setting.name, trial.loss(swarm.anchor), ratio, time.monotonic() - started)


def all_reduce(trial: Trial) -> Outcome:
    started = time.monotonic()
    peers = [Peer(trial, number) for number in range(trial.peers)]
    for step in range(trial.steps):
        # One optimizer is enough: all would take the same step.
        peers[0].follow(step, [peer.gradient().clone() for peer in peers])
        for peer in peers[1:]:
            peer.weights.copy_(peers[0].weights)
    return Outcome("all-reduce every step", trial.loss(peers[0].weights), 1.0, time.monotonic() - started)


def without_exchange(trial: Trial) -> list[Outcome]:
    started = time.monotonic()
    peers = [Peer(trial, number) for number in range(trial.peers)]
    for step in range(trial.steps):
        for peer in peers:
            peer.train(step)
    losses = [trial.loss(peer.weights) for peer in peers]
    seconds = time.monotonic() - started
    mean = Outcome("never exchanging (mean)", sum(losses) / len(losses), None, seconds)
    return [Outcome("one peer alone", losses[0], None, seconds / len(peers)), mean]


def smaller(manifest: Manifest, steps: int, small: bool) -> Manifest:
    """The manifest with its decay over the trial's length and, if `small`, a model and batch for a slow machine."""
    train = manifest.train.model_copy(update={"decay_steps": steps})
    model = manifest.model
    if small:
        model = model.model_copy(update={"width": 64, "layers": 2, "heads": 2, "hidden": 172, "context": 64})
        train = train.model_copy(update={"batch_tokens": 512})
    return manifest.model_copy(update={"model": model, "train": train})


def show(outcome: Outcome) -> None:
    ratio = f"{outcome.bytes_ratio:8.0f}" if outcome.bytes_ratio else "       -"
    print(
        f"{outcome.validation_loss:8.4f}  {ratio}  {outcome.seconds:6.0f} s  {outcome.name}",
        file=sys.stderr,
        flush=True,
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--manifest", type=Path, default=Path("configs/demo.toml"))
    parser.add_argument("--small", action="store_true", help="a model of 0.1 million parameters")
    parser.add_argument("--peers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600, help="inner steps a peer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    manifest = smaller(load_manifest(options.manifest), options.steps, options.small)
    corpus = open_source(manifest.data, options.manifest.parent)
    trial = Trial(manifest, corpus, options.peers, options.steps, options.seed)
    print("   nats  all-reduce/sent  time    setting", file=sys.stderr)
    outcomes = [all_reduce(trial), *without_exchange(trial)] if not options.only else []
    for outcome in outcomes:
        show(outcome)
    for setting in grid():
        if options.only in setting.name:
            outcomes.append(run(trial, setting))
            show(outcomes[-1])
    if options.json:
        settings = {outcome.name: asdict(outcome) for outcome in outcomes}
        print(json.dumps({"parameters": trial.initial.numel(), "steps": options.steps, "settings": settings}))


if __name__ == "__main__":
    main()
