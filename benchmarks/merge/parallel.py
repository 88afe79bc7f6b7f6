"""Data parallel training as it is done in a data centre: gradients in fp32, summed by gloo in every step."""

import argparse
import time
from contextlib import suppress
from pathlib import Path

from torch import distributed

from benchmarks.merge.gloo import gloo_parser, join_group
from node.data import Batches, open_source
from node.model import Llama, initial_weights
from node.trainer.inner import InnerOptimizer
from node.trainer.inner_step import accumulate_gradient
from optim.inner.adamw import AdamW
from protocol.manifest import load_manifest


def main() -> None:
    parser = gloo_parser()
    parser.add_argument("--manifest", type=Path)
    parser.add_argument("--steps", type=int, help="of a turn")
    words = parser.parse_args()
    conversation = join_group(words)
    training = Training(words)
    conversation.say()
    while True:
        conversation.hear()
        conversation.say(compute_share=training.share())


class Training:
    def __init__(self, words: argparse.Namespace) -> None:
        manifest = load_manifest(words.manifest)
        self._peers, self._steps, self._train = words.peers, words.steps, manifest.train
        self._model = Llama(manifest.model)
        self._model.load_flat(initial_weights(manifest.model, manifest.run.seed))
        self._optimizer = InnerOptimizer(self._model, manifest.train, AdamW())
        corpus = open_source(manifest.data, words.manifest.parent)
        self._reader = Batches(corpus, manifest.model.context, manifest.run.seed, str(words.rank))
        self._sequences = manifest.train.batch_tokens // manifest.model.context
        self._step = 0

    def share(self) -> float:
        """Of the time of some steps, how much was no exchange."""
        began, exchanging = time.monotonic(), 0.0
        for _ in range(self._steps):
            accumulate_gradient(self._model, self._reader.next(self._sequences), self._train.microbatch)
            gradient = self._model.flat.grad
            assert gradient is not None
            sent = time.monotonic()
            distributed.all_reduce(gradient)
            exchanging += time.monotonic() - sent
            gradient /= self._peers
            self._optimizer.step(self._step)
            self._optimizer.clear_gradient()
            self._step += 1
        return 1 - exchanging / (time.monotonic() - began)


if __name__ == "__main__":
    with suppress(EOFError):  # whoever gave the orders is gone
        main()
