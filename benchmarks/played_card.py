"""A peer whose trainer plays a card: `python -m benchmarks.played_card join RUN ...`.

Daemon, exchange, encoding and shared memory are those of any peer. Only the inner step is not computed: it ends after
PLAYED_STEP_SECONDS, as on a card of that speed, and leaves random progress in the weights. Copies between the card and
the shared memory take their bytes over COPY_BYTES_PER_SECOND. A card has its next step queued while the last one ends,
so a step that follows another one directly begins when that one is due, even if this process wakes up late. Progress
of a small model grows with the steps, so that peers of unequal speed pass each other's tests.

Each contribution appends a line to a file in PLAYED_FOLDER: the time, the steps made before, the seconds by activity.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import node.trainer.ipc.trainer_process
from node.trainer.__main__ import main as train

STEP_VARIABLE, FOLDER_VARIABLE = "PLAYED_STEP_SECONDS", "PLAYED_FOLDER"
MODULE = "benchmarks.played_card"
COPY_BYTES_PER_SECOND = 20e9  # pinned memory over sixteen lanes of PCIe 4
PROGRESS = 1e-4  # standard deviation of what a round changes in a weight; the half of its variance all peers share
SMALL_MODEL = 1 << 20  # parameters, all of which move at each step
ROUND_STRIDE = 65_537  # so that no two rounds move alike


def play() -> None:
    """Make the trainers of this process play a card."""
    import torch
    from torch import Tensor

    import node.trainer.loop
    from node.trainer.inner_step import ValidationLoss
    from node.trainer.ipc.channel import ContributionHeader, TrainerChannel, TrainerConfig
    from node.trainer.live import LiveVectors, VectorsInPlace
    from optim.round_plan import RoundPlanner

    class PlayedVectors(VectorsInPlace):
        """Vectors in the shared memory that take as long to copy as those on a card."""

        is_shared: ClassVar[bool] = False

        def save(self, shared: Mapping[str, Tensor]) -> None:
            self._copy()

        def load(self, shared: Mapping[str, Tensor]) -> None:
            self._copy()

        can_shift = True

        def shift(self, difference: Tensor) -> None:
            time.sleep(difference.nbytes / COPY_BYTES_PER_SECOND)  # the thread has moved the same memory

        def _copy(self) -> None:
            copied = [self._model.flat, *self._optimizer.vectors.values()]
            time.sleep(sum(vector.nbytes for vector in copied) / COPY_BYTES_PER_SECOND)

    class PlayedTrainer(node.trainer.loop.Trainer):
        """Makes steps that take the time of a card."""

        def _build_model(
            self, config: TrainerConfig, program: RoundPlanner, channel: TrainerChannel, *, has_open_gradient: bool
        ) -> LiveVectors:
            super()._build_model(config, program, channel, has_open_gradient=has_open_gradient)
            self._step_seconds = float(os.environ[STEP_VARIABLE])
            self._log = Path(os.environ[FOLDER_VARIABLE]) / config.peer_id
            self._due, self._held = 0.0, -1.0
            size, own = self._model.flat.numel(), int(config.peer_id.encode().hex(), 16) % 2**31
            both = [torch.randn(size, generator=torch.Generator().manual_seed(seed)) for seed in (0, own)]
            self._noise = (both[0] + both[1]) * (PROGRESS / 2**0.5)
            return PlayedVectors(self._model, self._optimizer, has_open_gradient)

        encodes_aside = adopts_aside = True

        def validate(self, round_number: int) -> ValidationLoss:
            return ValidationLoss(1.0, 1)

        def make_contribution(self) -> ContributionHeader:
            line = {"at": time.monotonic(), "step": self._state.counters.step, "seconds": self._timer.seconds}
            line["cpu_seconds"] = time.process_time()
            with self._log.open("a") as log:
                log.write(json.dumps(line) + "\n")
            return super().make_contribution()

        def _take_step(self) -> None:
            now, held = time.monotonic(), sum(self._timer.seconds.values()) - self._timer.seconds.get("compute", 0.0)
            begun = self._due if held == self._held else now
            self._due, self._held = begun + self._step_seconds, held
            tokens = self._manifest.train.batch_tokens
            with self._timer.measure("compute"):
                self._move()
                time.sleep(max(0.0, self._due - time.monotonic()))
                self._state.count_step(tokens, 1.0, self._batches.position)
            self.report_step(tokens, 1.0)

        def _move(self) -> None:
            """Change the weights of one step's turn, all of them in a round; those of a small model a little each."""
            counters, steps, size = self._state.counters, self._state.plan.steps, self._noise.numel()
            if size <= SMALL_MODEL:
                self._model.flat.add_(self._noise.roll(counters.round * ROUND_STRIDE % size), alpha=1 / steps)
                return
            length = -(-size // steps)
            start = counters.since_message.steps % steps * length
            moved = self._model.flat[start : start + length]
            first = (start + counters.round * ROUND_STRIDE) % (size - length)
            moved += self._noise[first : first + len(moved)]

    node.trainer.loop.Trainer = PlayedTrainer  # type: ignore[misc]


def main() -> int:
    """Run the trainer if the arguments are a daemon's, otherwise the peer."""
    if sys.argv[1].isdigit():
        play()
        return train(sys.argv[1:])
    from node.cli import main as run

    node.trainer.ipc.trainer_process.TRAINER_MODULE = MODULE
    run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
