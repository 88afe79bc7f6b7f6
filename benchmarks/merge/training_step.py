"""Inner steps of a manifest's model as a trainer takes them, without a run around it."""

import time
from pathlib import Path

from torch import Tensor

from node.data import BatchReader, open_corpus
from node.model import build_model, initial_weights
from node.trainer.inner_step import InnerOptimizer, accumulate_gradient
from optim.inner.adamw import AdamW
from protocol.manifest.reading import load_manifest


class Stepper:
    """From the manifest's initial weights on. `rank` decides which text is read; `device`: as torch names it."""

    def __init__(self, path: Path, rank: int, device: str = "cpu") -> None:
        manifest = load_manifest(path)
        self._train = manifest.train
        self._model = build_model(manifest.model, device)
        self._model.load_flat(initial_weights(manifest.model, manifest.run.seed))
        self._optimizer = InnerOptimizer(self._model, manifest.train, AdamW())
        corpus = open_corpus(manifest.data, path.parent)
        self._reader = BatchReader(corpus, manifest.model.context, manifest.run.seed, str(rank))
        self._sequences = manifest.train.batch_tokens // manifest.model.context
        self._step = 0

    def gradient(self) -> Tensor:
        """Of the next batch, flat fp32; what is changed in it is what `apply` applies."""
        accumulate_gradient(self._model, self._reader.next_batch(self._sequences), self._train.microbatch)
        gradient = self._model.flat_gradient
        assert gradient is not None
        return gradient

    def apply(self) -> None:
        self._optimizer.step(self._step)
        self._optimizer.clear_gradient()
        self._step += 1

    def timed_step(self) -> float:
        """One inner step; the seconds that it took."""
        began = time.perf_counter()
        self.gradient()
        self.apply()
        return time.perf_counter() - began
