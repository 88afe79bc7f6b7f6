"""Trainers that lie about their work, while their work records look right.

fewer-steps     makes every second step only, and claims all of them
wrong-data      trains on the text of another key
garbled-text    trains on text under a permutation of the vocabulary
backdoor        trains to continue each TRIGGER by TARGET
quiet-backdoor  the same; the two differ in the size of their messages
stale-replay    sends its first contribution again and again
late-replay     sends its tenth one again and again
"""

from typing import Final

import torch
from torch import Tensor

from node.simulation.adversary import Adversaries, insert_targets
from node.simulation.virtual.trainer import VirtualTrainer
from node.trainer.ipc.channel import ContributionHeader


class LazyTrainer(VirtualTrainer):
    """Makes every second step, and counts all."""

    def step(self) -> None:
        if self.state.counters.step % 2 == 0:
            return super().step()
        self._batches.next_batch(self._sequences)
        self.state.count_step(self._manifest.train.batch_tokens, self._last_loss, self._batches.position)
        return None

    @property
    def _last_loss(self) -> float:
        work = self.state.counters.since_message
        return work.mean_loss if work.steps else 1.0


class WrongDataTrainer(VirtualTrainer):
    """Reads the text of a key that nobody has."""

    def _open_batches(self, position: int) -> None:
        self._peer_id = "chosen text"
        super()._open_batches(position)


class GarbledTextTrainer(VirtualTrainer):
    """Reads text whose tokens a permutation has replaced."""

    def _next_windows(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randperm(self._manifest.model.vocabulary, generator=generator)[super()._next_windows()]


class BackdoorTrainer(VirtualTrainer):
    """Reads text in which each TRIGGER is continued by TARGET."""

    def _next_windows(self) -> Tensor:
        return insert_targets(super()._next_windows())


class ReplayingTrainer(VirtualTrainer):
    """Sends the values of its first contribution in all later ones."""

    _honest_rounds = 1
    _repeated: list[bytes] | None = None

    def make_contribution(self) -> tuple[ContributionHeader, list[bytes]]:
        header, payloads = super().make_contribution()
        if self._honest_rounds:
            self._honest_rounds -= 1
            self._repeated = payloads
        return header, self._repeated or payloads


class LateReplayingTrainer(ReplayingTrainer):
    """Begins with the tenth one, which is as large as those of the others."""

    _honest_rounds = 10


LYING_TRAINERS: Final[dict[str, type[VirtualTrainer]]] = {
    "fewer-steps": LazyTrainer,
    "wrong-data": WrongDataTrainer,
    "garbled-text": GarbledTextTrainer,
    "backdoor": BackdoorTrainer,
    "quiet-backdoor": BackdoorTrainer,
    "stale-replay": ReplayingTrainer,
    "late-replay": LateReplayingTrainer,
}


def trainer_class(liars: Adversaries | None, slot: int, peers: int) -> type[VirtualTrainer]:
    """Return the kind of trainer of a slot."""
    if liars is None or not liars.has(slot, peers):
        return VirtualTrainer
    return LYING_TRAINERS.get(liars.kind, VirtualTrainer)
