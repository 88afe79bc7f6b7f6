"""The work of every rank of a node, rank 0 included, and the loop of the others."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from node.data.batches import count_targets, inputs_and_targets
from node.data.corpus import UNCOUNTED
from node.from_manifest import build_program
from node.model import LanguageModel
from node.options import TrainerOptions
from node.trainer.devices.compiling import build_dealt_model, uncompiled
from node.trainer.devices.device import (
    MicrobatchTooLarge,
    autocast_context,
    is_out_of_memory,
    limit_memory,
    measure_device_use,
    uses_bf16,
)
from node.trainer.ipc.channel import FrameSocket
from node.trainer.ipc.shared_memory import SharedLayout, SharedMemory
from node.trainer.ranks.group import RankGroup, listen_for_ranks, receive_into, receive_part, send_from, send_part
from node.trainer.ranks.messages import (
    TO_RANK,
    ClearVectors,
    CopyVectors,
    Done,
    EndRank,
    Listening,
    MeasureDevice,
    MeasureLoss,
    Meet,
    RankCommand,
    RankConfig,
    RankStep,
)
from node.trainer.ranks.sharded_model import ShardedModel, ShardedOptimizer
from node.trainer.ranks.shards import Shard, own_pieces, own_shards
from optim.experts import add_tokens
from optim.inner.base import WEIGHTS, InnerUpdateRule
from protocol.manifest.reading import parse_manifest
from protocol.manifest.run import Manifest

DEFAULT_OPTIONS = TrainerOptions()
MEET_SECONDS: Final = 120.0  # until all ranks have imported torch and listen


class Rank:
    """One rank's parts of model and optimizer. All ranks carry out the same commands in the same order.

    A rank on another machine than rank 0 has no shared memory; rank 0 sends and receives its parts.
    """

    def __init__(
        self,
        manifest: Manifest,
        inner: InnerUpdateRule,
        microbatch: int,
        group: RankGroup,
        shared_memory: SharedMemory | None,
        options: TrainerOptions = DEFAULT_OPTIONS,
    ) -> None:
        self._context = manifest.model.context
        self._microbatch = microbatch
        self.group = group
        self._shared_memory = shared_memory
        model, self.compile_fault = build_dealt_model(manifest, group.device, microbatch, options, vote=self._add_up)
        self._is_compiled = options.compile and not self.compile_fault
        self._model = ShardedModel(model, group, uses_bf16(group.device))
        self.optimizer = ShardedOptimizer(self._model, manifest.train, inner, group)

    @property
    def model(self) -> LanguageModel:
        """Return the module, which computes only when all ranks do."""
        return self._model.module

    @property
    def parts(self) -> Iterator[tuple[Shard, Tensor]]:
        """Yield each part of a parameter that this rank holds, and its weights."""
        return self._model.parts

    def carry_out(self, command: RankCommand) -> None:
        """Carry out a command of rank 0 on another rank."""
        match command:
            case RankStep():
                self.take_step(command, self._room(command.rows))
            case CopyVectors(direction="save"):
                self._save()
            case CopyVectors():
                self._load()
            case ClearVectors(names=names):
                for name in names:
                    self.optimizer.vectors[name].zero_()
            case MeasureLoss():
                self.measure_loss(command, [self._room(rows) for rows in command.rows])

    def take_step(self, command: RankStep, windows: Tensor) -> None:
        """Make a step as rank 0 does in `TrainerState.take_step`: all ranks see the same loss and norm."""
        optimizer = self.optimizer
        optimizer.train = command.train
        optimizer.age_at_join, optimizer.moments_age_at_join = command.age_at_join, command.moments_age_at_join
        loss = self.accumulate_gradient(command, windows)
        norm = optimizer.gradient_norm() if math.isfinite(loss) else math.nan
        if math.isfinite(norm):
            optimizer.apply(command.step, norm)
        optimizer.clear_gradient()

    def accumulate_gradient(self, command: RankStep, windows: Tensor) -> float:
        """Add this rank's part to the gradient of the mean loss over a batch; return the loss, the same on all ranks.

        Args:
            windows: (sequences, context + 1) token ids on rank 0; other ranks give room for them.
        """
        self.group.broadcast(windows)
        ahead = self.optimizer.own_lookahead_weights(command.step)
        if ahead is None:
            return self._accumulate(windows)
        own = self._model.copy_parts()
        self._model.replace_parts(ahead)
        loss = self._accumulate(windows)
        self._model.replace_parts(own)
        return loss

    @torch.no_grad()
    def measure_loss(self, command: MeasureLoss, batches: Sequence[Tensor]) -> tuple[float, int]:
        """Return the mean loss of an anchor in nats per token, the same on all ranks, and the number of tokens."""
        total, tokens = 0.0, 0
        anchor = self._shared_memory.anchor(command.round) if self._shared_memory else None
        with uncompiled(self._is_compiled), self._model.loaded(anchor):
            for windows in batches:
                self.group.broadcast(windows)
                counted = count_targets(windows)
                for piece in own_pieces(windows, self.group.ranks, self.group.rank, len(windows)):
                    loss = float(self._loss(piece.windows))
                    total += loss * piece.weight * counted
                tokens += counted
        return self.group.sum(total)[0] / max(1, tokens), tokens

    def _add_up(self, value: float) -> float:
        return self.group.sum(value)[0]

    def _accumulate(self, windows: Tensor) -> float:
        try:
            return self._accumulate_pieces(windows)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error) or self._microbatch == 1:
                raise
            raise MicrobatchTooLarge(f"no memory for microbatches of {self._microbatch} sequences") from error

    def _accumulate_pieces(self, windows: Tensor) -> float:
        total = torch.zeros((), device=self.group.device)
        routed = (0,) * len(self.model.take_routed_tokens())  # on every rank as many, for the sum
        pieces = own_pieces(windows, self.group.ranks, self.group.rank, self._microbatch)
        for number, piece in enumerate(pieces, start=1):
            if self.group.copies > 1:
                self._model.copy_gradient(is_last=number == len(pieces))
            loss = self._loss(piece.windows) * piece.weight
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
            tokens = self.model.take_routed_tokens()
            if piece.weight:
                routed = add_tokens(routed, tokens)
        summed, *counts = self.group.sum(float(total), *routed)
        self.optimizer.count_routed([int(count) for count in counts])
        return summed

    def _loss(self, windows: Tensor) -> Tensor:
        device = self.group.device
        if not count_targets(windows):  # its loss has no weight, and must be finite
            windows = windows & (UNCOUNTED - 1)
        with autocast_context(device):
            loss: Tensor = self._model.module(*inputs_and_targets(windows.to(device)))
        return loss

    def _room(self, rows: int) -> Tensor:
        """Return room for the windows of a batch, which rank 0 broadcasts."""
        return torch.empty(rows, self._context + 1, dtype=torch.int64)

    def send_parts(self, shared: Mapping[str, Tensor], rank: int) -> None:
        """Send a rank on another machine its parts of weights and optimizer vectors, as rank 0."""
        shards = self._shards_of(rank)
        for name in (WEIGHTS, *self.optimizer.vectors):
            send_from(shared[name], shards, rank)

    def receive_parts(self, shared: Mapping[str, Tensor], rank: int) -> None:
        """Receive the parts of a rank on another machine, as rank 0, unless this machine has the same."""
        if rank >= self.group.shard_ranks:
            return
        shards = self._shards_of(rank)
        for name in (WEIGHTS, *self.optimizer.vectors):
            receive_into(shared[name], shards, rank)

    def send_anchor(self, round_number: int, rank: int) -> None:
        """Send a rank on another machine its parts of the weights of an anchor, as rank 0."""
        assert self._shared_memory is not None
        send_from(self._shared_memory.anchor(round_number), self._shards_of(rank), rank)

    def _shards_of(self, rank: int) -> Sequence[Shard]:
        return own_shards(self.model.shapes.layout, self.group.shard_ranks, rank % self.group.shard_ranks)

    def _save(self) -> None:
        if self._shared_memory is not None:
            self.save(self._shared_memory.vectors)
        elif not self.group.holds_first_copy:
            return  # rank 0's machine has the same parts
        else:
            self._model.save_far(0)
            for vector in self.optimizer.vectors.values():
                for shard in self._model.shards:
                    send_part(vector[slice(*shard.own)], 0)

    def _load(self) -> None:
        if self._shared_memory is not None:
            self.load(self._shared_memory.vectors)
            return
        self._model.load_far(0)
        for vector in self.optimizer.vectors.values():
            for shard in self._model.shards:
                receive_part(vector[slice(*shard.own)], 0)

    def save(self, shared: Mapping[str, Tensor]) -> None:
        """Copy this rank's parts of weights and optimizer vectors into the shared memory."""
        self._model.save(shared[WEIGHTS])
        for name, vector in self.optimizer.vectors.items():
            for shard in self._model.shards:
                shared[name][slice(*shard.whole)].copy_(vector[slice(*shard.own)])

    def load(self, shared: Mapping[str, Tensor]) -> None:
        """Copy this rank's parts of weights and optimizer vectors from the shared memory."""
        self._model.load(shared[WEIGHTS])
        for name, vector in self.optimizer.vectors.items():
            for shard in self._model.shards:
                vector[slice(*shard.own)].copy_(shared[name][slice(*shard.whole)])


def follow(config: RankConfig, channel: FrameSocket, inherited: Sequence[int]) -> None:
    """Join the other ranks and carry out the commands of rank 0. Raises ChannelClosed if that is gone.

    `inherited` are the shared memory and the file in which the ranks meet, or nothing on another machine.
    """
    trainer, ranks = config.trainer, len(config.devices)
    device = torch.device(config.devices[config.rank])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    limit_memory(trainer.options.memory, device)
    manifest = parse_manifest(trainer.manifest.encode(), "the daemon's manifest")
    program = build_program(manifest)
    memory = SharedMemory.attach(inherited[:1], SharedLayout.of(program)) if inherited else None
    if config.site is None:
        group = RankGroup.join(config.rank, ranks, device, inherited[1])
    else:
        channel.send(Listening(port=listen_for_ranks(config.site.address(config.rank))))
        _require_meet(channel)
        group = RankGroup.join_site(config.rank, device, config.site)
    if device.type == "cuda" and memory is not None:
        memory.pin()
    rank = Rank(manifest, program.method.inner, config.microbatch, group, memory, trainer.options)
    while True:
        command = channel.receive_as(TO_RANK, None)
        if isinstance(command, EndRank):
            return group.leave()
        if isinstance(command, RankConfig | Meet) or command is None:
            raise ValueError("rank 0 sent its config twice")
        if isinstance(command, MeasureDevice):
            channel.send(Done(use=measure_device_use(device)))
            continue
        rank.carry_out(command)
        if isinstance(command, CopyVectors):
            channel.send(Done())


def _require_meet(channel: FrameSocket) -> None:
    command = channel.receive_as(TO_RANK, MEET_SECONDS)
    if not isinstance(command, Meet):
        raise TimeoutError(f"rank 0 opened no tunnels within {MEET_SECONDS:.0f} s")
