"""A trainer process that sleeps after each step, as one on an accelerator leaves the processors idle.

With PACED_STEP_SECONDS in the environment each step takes so long in all, and counts as computed: it plays the step of
another machine.
"""

import os
import sys
import time

from torch import Tensor

from node.trainer.__main__ import main

STEP_SECONDS = 0.04
PLAYED = "PACED_STEP_SECONDS"


def sleep_after_steps() -> None:
    from node.trainer.loop import Trainer

    take_step = Trainer._take_step

    def take_step_and_sleep(self: Trainer) -> None:
        take_step(self)
        time.sleep(STEP_SECONDS)

    Trainer._take_step = take_step_and_sleep  # type: ignore[method-assign]


def play_steps(seconds: float) -> None:
    from node.trainer.loop import Trainer

    accumulate, ended = Trainer._accumulate_gradient, 0.0

    def accumulate_and_sleep(self: Trainer, windows: Tensor, at_weights: Tensor | None) -> float:
        nonlocal ended
        begins = time.monotonic()
        # What this machine does between two steps is part of the step, unless the trainer waited.
        ends = (ended if begins - ended < seconds / 2 else begins) + seconds
        loss = accumulate(self, windows, at_weights)
        time.sleep(max(0.0, ends - time.monotonic()))
        ended = time.monotonic()
        return loss

    Trainer._accumulate_gradient = accumulate_and_sleep  # type: ignore[method-assign]


if __name__ == "__main__":
    if PLAYED in os.environ:
        play_steps(float(os.environ[PLAYED]))
    else:
        sleep_after_steps()
    sys.exit(main(sys.argv[1:]))
