"""A trainer process that claims all steps and makes every second one."""

import sys

from node.trainer.__main__ import main


def be_lazy() -> None:
    from node.trainer.loop import Trainer

    honest = Trainer._take_step

    def take_step(self: Trainer) -> None:
        state, train = self._state, self._manifest.train
        if state.counters.step % 2 == 0:
            return honest(self)
        self._batches.next_batch(train.batch_tokens // self._manifest.model.context)
        state.count_step(train.batch_tokens, state.counters.since_message.mean_loss or 1.0, self._batches.position)
        return None

    Trainer._take_step = take_step  # type: ignore[method-assign]


if __name__ == "__main__":
    be_lazy()
    sys.exit(main(sys.argv[1:]))
