"""What every method is held against, at equal tokens, with the same inner optimizer and the same data a peer.

data-parallel   all-reduce of fp32 gradients in each step, as a ring:
                step = 1 / slowest speed + 2 (P - 1) / P * 4 n / narrowest link + 2 (P - 1) * latency
local           every peer trains alone and nothing is ever exchanged; the mean loss of all peers
"""

import statistics
import time
from collections.abc import Callable, Sequence

from node.data import Batches, Corpus
from node.simulation.measure import Examiner, Outcome, Point, Recorder
from node.simulation.setting import Setting
from node.simulation.swarm import peer_name
from node.trainer.inner import InnerOptimizer
from node.trainer.inner_step import accumulate_gradient
from optim.inner.adamw import AdamW

FLOAT_BYTES = 4
DATA_PARALLEL = "data-parallel"
LOCAL = "local"


class _Group:
    """One model that some peers' data train together."""

    def __init__(self, setting: Setting, corpus: Corpus, slots: Sequence[int]) -> None:
        manifest = setting.manifest
        self.model = setting.model()
        self._train = manifest.train
        self.model.load_flat(setting.weights())
        self._optimizer = InnerOptimizer(self.model, manifest.train, AdamW())
        context, seed = manifest.model.context, manifest.run.seed
        self._sequences = manifest.train.batch_tokens // context
        self._readers = [Batches(corpus, context, seed, peer_name(slot)) for slot in slots]

    def step(self, number: int, counted: Callable[[], None]) -> None:
        for reader in self._readers:
            accumulate_gradient(self.model, reader.next(self._sequences), self._train.microbatch)
            counted()
        gradient = self.model.flat.grad
        assert gradient is not None
        gradient /= len(self._readers)
        self._optimizer.step(number)
        self._optimizer.clear_gradient()


def data_parallel(
    setting: Setting, corpus: Corpus, examiner: Examiner, points: int, counted: Callable[[], None]
) -> Outcome:
    started = time.process_time()
    group = _Group(setting, corpus, range(setting.peers))
    numel = group.model.flat.numel()
    sent = ring_bytes(numel, setting.peers)
    seconds = all_reduce_step(setting, numel)
    recorder = Recorder(examiner, points)
    for step in range(setting.steps):
        group.step(step, counted)
        if recorder.is_due((step + 1) / setting.steps):
            tokens = setting.target_tokens * (step + 1) // setting.steps
            recorder.record(tokens, seconds * (step + 1), sent * (step + 1), group.model.flat.detach)
    return Outcome(
        validation_loss=recorder.curve[-1].loss,
        bits_per_parameter_step=8.0 * FLOAT_BYTES,
        bits_per_parameter_sync=8.0 * FLOAT_BYTES,
        virtual_seconds=seconds * setting.steps,
        compute_share=statistics.fmean(1 / speed / seconds for speed in setting.speeds),
        rounds=setting.steps,
        tokens=setting.target_tokens,
        sent_bytes=sent * setting.steps,
        curve=tuple(recorder.curve),
        processor_seconds=time.process_time() - started,
    )


def local(setting: Setting, corpus: Corpus, examiner: Examiner, counted: Callable[[], None]) -> Outcome:
    started = time.process_time()
    losses = []
    for slot in range(setting.peers):
        group = _Group(setting, corpus, [slot])
        for step in range(setting.steps):
            group.step(step, counted)
        losses.append(examiner.loss(group.model.flat.detach()))
    loss, seconds = statistics.fmean(losses), setting.steps / min(setting.speeds)
    return Outcome(
        validation_loss=loss,
        bits_per_parameter_step=0.0,
        bits_per_parameter_sync=0.0,
        virtual_seconds=seconds,
        compute_share=statistics.fmean(min(setting.speeds) / speed for speed in setting.speeds),
        rounds=0,
        tokens=setting.target_tokens,
        sent_bytes=0.0,
        curve=(Point(setting.target_tokens, seconds, 0.0, loss),),
        processor_seconds=time.process_time() - started,
    )


def ring_bytes(numel: int, peers: int) -> float:
    """What each peer sends in one all-reduce."""
    return 2 * (peers - 1) / peers * FLOAT_BYTES * numel


def all_reduce_step(setting: Setting, numel: int) -> float:
    """Virtual seconds of one step of the slowest peer and its all-reduce."""
    transfer = ring_bytes(numel, setting.peers) / min(setting.bandwidths)
    return 1 / min(setting.speeds) + transfer + 2 * (setting.peers - 1) * setting.latency
