"""What every method is held against, at equal tokens, with the same inner optimizer and the same data a peer.

data-parallel   all-reduce of fp32 gradients in each step, as a ring:
                step = 1 / slowest speed + 2 (P - 1) / P * 4 n / narrowest link + 2 (P - 1) * latency
local           every peer trains alone and nothing is ever exchanged; the mean loss of all peers
"""

import statistics
import time
from collections.abc import Callable, Sequence

from node.data import BatchReader, Corpus
from node.simulation.measure import Evaluator, SimulationResult, CurvePoint, CurveRecorder
from node.simulation.setting import SimulationConfig
from node.simulation.swarm import simulated_peer_id
from node.trainer.inner import InnerOptimizer
from node.trainer.inner_step import accumulate_gradient
from optim.inner.adamw import AdamW

FLOAT_BYTES = 4
DATA_PARALLEL = "data-parallel"
LOCAL = "local"


class _SharedModel:
    """One model that some peers' data train together."""

    def __init__(self, config: SimulationConfig, corpus: Corpus, slots: Sequence[int]) -> None:
        manifest = config.manifest
        self.model = config.build_model()
        self._train = manifest.train
        self.model.load_flat(config.start_weights())
        self._optimizer = InnerOptimizer(self.model, manifest.train, AdamW())
        context, seed = manifest.model.context, manifest.run.seed
        self._sequences = manifest.train.batch_tokens // context
        self._readers = [BatchReader(corpus, context, seed, simulated_peer_id(slot)) for slot in slots]

    def step(self, number: int, on_step: Callable[[], None]) -> None:
        for reader in self._readers:
            accumulate_gradient(self.model, reader.next_batch(self._sequences), self._train.microbatch)
            on_step()
        gradient = self.model.flat.grad
        assert gradient is not None
        gradient /= len(self._readers)
        self._optimizer.step(number)
        self._optimizer.clear_gradient()


def train_data_parallel(
    config: SimulationConfig, corpus: Corpus, evaluator: Evaluator, points: int, on_step: Callable[[], None]
) -> SimulationResult:
    started = time.process_time()
    group = _SharedModel(config, corpus, range(config.peers))
    numel = group.model.flat.numel()
    sent = all_reduce_bytes(numel, config.peers)
    seconds = all_reduce_step_seconds(config, numel)
    recorder = CurveRecorder(evaluator, points)
    for step in range(config.steps):
        group.step(step, on_step)
        if recorder.is_due((step + 1) / config.steps):
            tokens = config.target_tokens * (step + 1) // config.steps
            recorder.record(tokens, seconds * (step + 1), sent * (step + 1), group.model.flat.detach)
    return SimulationResult(
        validation_loss=recorder.curve[-1].loss,
        bits_per_parameter_step=8.0 * FLOAT_BYTES,
        bits_per_parameter_sync=8.0 * FLOAT_BYTES,
        virtual_seconds=seconds * config.steps,
        compute_share=statistics.fmean(1 / speed / seconds for speed in config.speeds),
        rounds=config.steps,
        tokens=config.target_tokens,
        sent_bytes=sent * config.steps,
        curve=tuple(recorder.curve),
        processor_seconds=time.process_time() - started,
    )


def train_locally(config: SimulationConfig, corpus: Corpus, evaluator: Evaluator, on_step: Callable[[], None]) -> SimulationResult:
    started = time.process_time()
    losses = []
    for slot in range(config.peers):
        group = _SharedModel(config, corpus, [slot])
        for step in range(config.steps):
            group.step(step, on_step)
        losses.append(evaluator.loss(group.model.flat.detach()))
    loss, seconds = statistics.fmean(losses), config.steps / min(config.speeds)
    return SimulationResult(
        validation_loss=loss,
        bits_per_parameter_step=0.0,
        bits_per_parameter_sync=0.0,
        virtual_seconds=seconds,
        compute_share=statistics.fmean(min(config.speeds) / speed for speed in config.speeds),
        rounds=0,
        tokens=config.target_tokens,
        sent_bytes=0.0,
        curve=(CurvePoint(config.target_tokens, seconds, 0.0, loss),),
        processor_seconds=time.process_time() - started,
    )


def all_reduce_bytes(numel: int, peers: int) -> float:
    """What each peer sends in one all-reduce."""
    return 2 * (peers - 1) / peers * FLOAT_BYTES * numel


def all_reduce_step_seconds(config: SimulationConfig, numel: int) -> float:
    """Virtual seconds of one step of the slowest peer and its all-reduce."""
    transfer = all_reduce_bytes(numel, config.peers) / min(config.bandwidths)
    return 1 / min(config.speeds) + transfer + 2 * (config.peers - 1) * config.latency
