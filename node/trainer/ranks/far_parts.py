"""Send a rank's parts of a flat vector to another machine and back, which has no shared memory with the daemon.

Parts are contiguous in the flat vector, so they are sent from and received into their place, at most CHUNK_VALUES at a
time; an accelerator's parts pass through one buffer of that length.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from node.trainer.ranks.shards import Shard

CHUNK_VALUES: Final = 1 << 22  # 16 MiB


def send_from(flat: Tensor, shards: Sequence[Shard], rank: int) -> None:
    """Send the parts of another rank from the flat vector of the model."""
    for shard in shards:
        send_part(flat[slice(*shard.whole)], rank)


def receive_into(flat: Tensor, shards: Sequence[Shard], rank: int) -> None:
    """Receive the parts of another rank into the flat vector of the model."""
    for shard in shards:
        receive_part(flat[slice(*shard.whole)], rank)


def send_part(part: Tensor, rank: int) -> None:
    """Send values (n,) to another rank."""
    for chunk in _chunks(part):
        dist.send(chunk.cpu(), rank)


def receive_part(part: Tensor, rank: int) -> None:
    """Receive values (n,) from another rank."""
    for chunk in _chunks(part):
        if chunk.device.type == "cpu":
            dist.recv(chunk, rank)
            continue
        buffer = torch.empty(len(chunk), dtype=chunk.dtype)
        dist.recv(buffer, rank)
        chunk.copy_(buffer)


def _chunks(part: Tensor) -> Iterator[Tensor]:
    if len(part):
        yield from torch.split(part, CHUNK_VALUES)
