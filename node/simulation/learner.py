"""The trainer's side of a virtual peer: the same inner state, optimizer and sender as a trainer process has."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from torch import Tensor

from node.arena import Arena, Contents
from node.channel import Fate, Message
from node.daemon.offers import Past
from node.data import Batches, Corpus
from node.model import Llama
from node.trainer.inner import InnerOptimizer
from node.trainer.inner_state import InnerState
from node.trainer.inner_step import accumulate_gradient
from node.trainer.pace import Stretch, Wanted, is_message_due, may_adopt, must_wait
from optim.exchange import Sender
from optim.program import Program
from protocol.blobs.blob import Blob
from protocol.errors import MurmurError
from protocol.identity import PeerId
from protocol.manifest import Manifest


class Learner:
    """Starts from `anchor`, the state after `round_number` rounds."""

    def __init__(
        self, model: Llama, manifest: Manifest, program: Program, corpus: Corpus, sender: Sender, me: PeerId,
        shared: list[Tensor], round_number: int,
    ) -> None:  # fmt: skip
        self._train = manifest.train
        self._sequences = manifest.train.batch_tokens // manifest.model.context
        self._optimizer = InnerOptimizer(model, manifest.train, program.method.inner)
        self._arena = Arena.create(Contents.of(program))
        self._arena.close()  # the memory stays; a thousand peers would use up the descriptors
        self._model = model
        self.wanted = Wanted()
        self._stretch = Stretch()
        self.state = InnerState(model, self._optimizer, program, sender, self._arena)
        self._arena.write_anchor(round_number, shared)
        self.state.start(round_number)
        self._batches = Batches(corpus, manifest.model.context, manifest.run.seed, me)

    def must_wait(self) -> bool:
        return must_wait(self.state.counters, self.state.plan)

    def may_adopt(self) -> bool:
        return may_adopt(self.state.counters, self.state.plan)

    def is_message_due(self, most_steps: int, now: float) -> bool:
        """`most_steps`: so many bring the run to its target."""
        counters, plan = self.state.counters, self.state.plan
        seconds = self._stretch.seconds(counters.since_message.steps, now)
        steps = self.wanted.of(min(plan.steps, most_steps), counters.round)
        return is_message_due(counters, steps, plan.method.schedule, seconds)

    def step(self) -> None:
        step = self.state.counters.step
        windows, place = self._batches.next(self._sequences), self._optimizer.look_ahead(step)
        loss = accumulate_gradient(self._model, windows, self._train.microbatch, place)
        applied = self._optimizer.step(step)
        self._optimizer.clear_gradient()
        if not applied:
            raise MurmurError("a simulated peer's gradient is not finite; lower train.learning_rate")
        self.state.count_step(self._train.batch_tokens, loss, self._batches.position)

    def message(self) -> tuple[Message, list[bytes]]:
        message = self.state.message()
        return message, [bytes(part) for part in self._arena.outbox_parts(message.sizes)]

    def adopt(
        self, round_number: int, shared: list[Tensor], fate: Fate, revised: Iterable[Past],
        payloads: Callable[[Sequence[Blob]], list[bytes]],
    ) -> None:  # fmt: skip
        """`revised`: earlier messages, whose fate is another on the chain that was taken over."""
        self._arena.write_anchor(round_number, shared)
        self.state.adopt(round_number, fate)
        for entry in revised:
            self.state.revise(entry.offer.message, entry.fate, partial(payloads, entry.offer.parts))
