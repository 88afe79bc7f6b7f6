"""The way of microbatches through the stages and back, by random routes through live peers.

The peer of the first stage owns a microbatch: it reads the text and keeps account. The peer of each further stage is
drawn among those with room, faster ones more often. A backward pass goes where the forward pass was. If that peer is
dead, another one of the stage runs it from the same input; what the dead one had added since its last contribution is
lost. If the owner dies, its microbatches are struck from all open steps; those that some stages have counted are torn.
"""

import random
from collections import deque
from dataclasses import asdict, dataclass
from functools import partial

from torch import Tensor

from node.data import BatchReader, Corpus
from node.simulation.config import SimulationConfig
from node.simulation.pipeline.stage_worker import BACKWARD_UNITS, Microbatch, StageWorker, Task
from node.simulation.swarm import simulated_peer_id
from node.simulation.virtual.network import VirtualClock, VirtualNetwork
from node.simulation.virtual.peer import VirtualPeer


@dataclass
class FlowCounts:
    """Microbatches by what became of them.

    Attributes:
        done: back at their owners.
        lost: a stage's passes that died with a peer before its next contribution.
        torn: lost with their owners after some stages had counted them.
        redirected: passes that another peer took over.
    """

    done: int = 0
    lost: int = 0
    torn: int = 0
    redirected: int = 0

    def __add__(self, other: "FlowCounts") -> "FlowCounts":
        return FlowCounts(**{name: count + getattr(other, name) for name, count in asdict(self).items()})


class MicrobatchFlow:
    """All microbatches of one run. `staleness` is the number of steps between both passes of a microbatch."""

    def __init__(self, config: SimulationConfig, corpus: Corpus, clock: VirtualClock, staleness: int = 0) -> None:
        manifest, pipeline = config.manifest, config.manifest.pipeline
        self._config = config
        self.clock = clock
        self.staleness = staleness
        self.stages = pipeline.stages
        self.per_step = manifest.train.batch_tokens // (pipeline.microbatch * manifest.model.context)
        self.network = VirtualNetwork(clock, config.bandwidths * self.stages, config.latency)
        self.counts = FlowCounts()
        self.busy_seconds = 0.0
        self.workers: list[list[StageWorker]] = [[] for _ in range(self.stages)]  # the living, by stage
        self._waiting: list[deque[Task]] = [deque() for _ in range(self.stages)]
        self._random = random.Random(f"murmur pipeline {manifest.run.seed}")
        context, seed = manifest.model.context, manifest.run.seed
        slots = range(config.peers)
        self._readers = [BatchReader(corpus, context, seed, simulated_peer_id(slot)) for slot in slots]

    def unit_seconds(self, peer: VirtualPeer) -> float:
        """Return the virtual seconds of a forward pass of one microbatch through one stage."""
        return 1 / (self._config.speeds[peer.slot] * self.per_step * self.stages * BACKWARD_UNITS)

    def on_room(self, stage: int) -> None:
        """Let microbatches into a stage that has room for some."""
        while self._waiting[stage]:
            worker = self._draw(stage)
            if worker is None:
                return
            task = self._waiting[stage].popleft()
            if not task.microbatch.is_struck:
                self._assign(task, stage, worker)
        while stage == 0 and (worker := self._draw(0)) is not None:
            self._assign(Task(self._read(worker), "forward"), 0, worker)

    def on_forward(self, microbatch: Microbatch, stage: int, output: Tensor) -> None:
        """Send a microbatch on to the next stage."""
        del microbatch.inputs[stage + 1 :]
        microbatch.inputs.append(output)
        self._waiting[stage + 1].append(Task(microbatch, "forward"))
        self.on_room(stage + 1)

    def on_backward(self, microbatch: Microbatch, stage: int, gradient: Tensor | None) -> None:
        """Send a gradient back to the stage before, or end the microbatch's way."""
        if stage == 0:
            self.counts.done += 1
            if microbatch.route[0].peer.is_done:
                self.on_room(0)
            return
        assert gradient is not None
        task, worker = Task(microbatch, "backward", gradient), microbatch.route[stage - 1]
        if worker.peer.is_alive:
            self._send(task, stage, worker)
        else:
            self.redirect(task, stage - 1)
        if microbatch.route[stage].peer.is_done:
            self.on_room(stage)

    def redirect(self, task: Task, stage: int) -> None:
        """Let another peer of the stage run the task of a dead one."""
        if task.microbatch.is_struck:
            return
        self.counts.redirected += 1
        self._waiting[stage].append(task)
        self.on_room(stage)

    def add(self, worker: StageWorker) -> None:
        """Let a new peer take part."""
        self.workers[worker.stage].append(worker)

    def remove(self, worker: StageWorker) -> None:
        """Take a dead peer out, and pass its tasks on."""
        self.workers[worker.stage].remove(worker)
        trainer = worker.peer.trainer
        unsent = trainer.state.counters.since_message.steps if trainer else 0
        self.counts.lost += worker.returned + unsent * self.per_step
        if worker.stage == 0:
            for microbatch in [*worker.pending]:
                self._strike(microbatch)
        for task in worker.leave():
            self.redirect(task, worker.stage)

    def _strike(self, microbatch: Microbatch) -> None:
        microbatch.is_struck = True
        self.counts.torn += microbatch.has_counted
        for worker in microbatch.route:
            worker.strike(microbatch)
        for stage in range(1, self.stages):
            self.clock.schedule(0.0, partial(self.on_room, stage))

    def _draw(self, stage: int) -> StageWorker | None:
        """Draw a peer with room, by speed."""
        candidates = [worker for worker in self.workers[stage] if worker.can_take]
        if not candidates or (stage == 0 and all(worker.peer.is_done for row in self.workers for worker in row)):
            return None
        speeds = [self._config.speeds[worker.peer.slot] for worker in candidates]
        return self._random.choices(candidates, speeds)[0]

    def _read(self, worker: StageWorker) -> Microbatch:
        reader, chain, manifest = self._readers[worker.peer.slot], worker.peer.chain, self._config.manifest
        reader.weights = manifest.source_weights(chain.round, chain.tokens)
        windows = reader.next_batch(manifest.pipeline.microbatch)
        return Microbatch(windows[:, 1:], [windows[:, :-1]])

    def _assign(self, task: Task, stage: int, worker: StageWorker) -> None:
        """Give a task to the worker that its stage has drawn, for both passes of the microbatch."""
        route = task.microbatch.route
        source = stage + 1 if task.direction == "backward" else stage - 1
        if stage == len(route):
            route.append(worker)
        else:
            route[stage].strike(task.microbatch)
            route[stage] = worker
        worker.take(task.microbatch)
        if stage == 0:
            worker.start(task)
        else:
            self._send(task, source, worker)

    def _send(self, task: Task, source: int, worker: StageWorker) -> None:
        """Carry a task's activation from the peer of stage `source` to the worker."""
        manifest = self._config.manifest
        size = manifest.pipeline.activation_bytes(manifest.model.context, manifest.model.stream_width)
        sender = task.microbatch.route[source]
        self.network.send_blob(self._link(sender), self._link(worker), size, partial(self._arrive, task, worker))

    def _arrive(self, task: Task, worker: StageWorker) -> None:
        if worker.peer.is_alive:
            worker.start(task)
        else:
            self.redirect(task, worker.stage)

    def _link(self, worker: StageWorker) -> int:
        return worker.stage * self._config.peers + worker.peer.slot
