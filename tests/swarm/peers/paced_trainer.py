"""A trainer process that sleeps after each step, as one on an accelerator leaves the processors idle."""

import sys
import time

from node.trainer.__main__ import main

STEP_SECONDS = 0.04


def sleep_after_steps() -> None:
    from node.trainer.loop import Trainer

    take_step = Trainer._take_step

    def take_step_and_sleep(self: Trainer) -> None:
        take_step(self)
        time.sleep(STEP_SECONDS)

    Trainer._take_step = take_step_and_sleep  # type: ignore[method-assign]


if __name__ == "__main__":
    sleep_after_steps()
    sys.exit(main(sys.argv[1:]))
