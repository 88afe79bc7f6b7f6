"""The process group of a node's ranks: gloo on CPUs, and nccl besides for accelerators.

The ranks of one machine meet in a file without a name, whose descriptor they inherit, and connect over the loopback
interface. Those of a site meet in a TCPStore; for gloo, each listens at a loopback address of its own, to which the
tunnels of node.trainer.site lead from the other machines.

A rank on another machine has no shared memory with the daemon, so rank 0 sends its parts of a flat vector and receives
them back. They are contiguous in that vector, so they are sent from and received into their place, CHUNK_VALUES at a
time; an accelerator's parts pass through one buffer of that length.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from node.trainer.ranks.messages import SiteGroup
from node.trainer.ranks.shards import Shard

COLLECTIVE_SECONDS: Final = 600.0  # the longest wait for another rank; its death is noticed at once
BACKENDS: Final = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
SITE_BACKEND: Final = "murmur_gloo"
SITE_BACKENDS: Final = {"cpu": SITE_BACKEND, "cuda": f"cpu:{SITE_BACKEND},cuda:nccl"}
LOOPBACK: Final = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
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


class RankGroup:
    """All ranks of this node, as one of them sees them. Tensors of `sum` and `broadcast` are on the CPU.

    A copy of the model is dealt to `shard_ranks` of them, and there are `copies` of it.
    """

    def __init__(self, rank: int, ranks: int, device: torch.device, mesh: Sequence[Sequence[int]] = ()) -> None:
        self.rank = rank
        self.ranks = ranks
        self.device = device
        world = dist.group.WORLD
        assert world is not None
        self.copies = max(1, len(mesh))
        self.shard_ranks = ranks // self.copies
        self.shard_rank = rank % self.shard_ranks
        if self.copies == 1:
            self.mesh, self._shard_group = DeviceMesh.from_group(world, device.type), world
        else:
            self.mesh = DeviceMesh(device.type, [list(row) for row in mesh], mesh_dim_names=("copy", "shard"))
            self._shard_group = self.mesh.get_group("shard")

    @classmethod
    def join(cls, rank: int, ranks: int, device: torch.device, store_fd: int) -> "RankGroup":
        """Wait for the other ranks of this machine, and connect with them."""
        os.environ.update(LOOPBACK)
        store = dist.FileStore(  # type: ignore[attr-defined]
            f"/proc/self/fd/{store_fd}", ranks
        )
        _connect(BACKENDS[device.type], rank, ranks, device, store)
        return cls(rank, ranks, device)

    @classmethod
    def join_site(cls, rank: int, device: torch.device, site: SiteGroup, store: TCPStore | None = None) -> "RankGroup":
        """Wait for the other ranks of the site, all of which listen, and connect with them; rank 0 has the store."""
        ranks = sum(site.machines)
        if store is None:
            timeout = timedelta(seconds=COLLECTIVE_SECONDS)
            store = TCPStore(site.store_address, site.store_port, is_master=False, timeout=timeout)
        _connect(SITE_BACKENDS[device.type], rank, ranks, device, store)
        return cls(rank, ranks, device, site.mesh)

    @property
    def holds_first_copy(self) -> bool:
        """Return whether this rank's parts belong to the copy of the model that rank 0 has."""
        return self.rank < self.shard_ranks

    def sum(self, *values: float) -> list[float]:
        """Return the sums of these values over all ranks, the same on each."""
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def gather(self, part: Tensor, largest: int) -> Tensor:
        """Return the parts of one copy one after the other, on the device; only the last ones may be shorter."""
        padded = part.new_zeros(largest)
        padded[: len(part)] = part
        whole = part.new_empty(self.shard_ranks * largest)
        dist.all_gather(list(whole.view(self.shard_ranks, -1).unbind()), padded, group=self._shard_group)
        return whole

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return the tensor of rank 0; the others give one of the same shape, which is overwritten."""
        dist.broadcast(tensor, 0)
        return tensor

    def leave(self) -> None:
        """Close the connections."""
        dist.destroy_process_group()


def listen_for_ranks(address: str) -> int:
    """Let gloo listen at a loopback address in this process; return the port."""
    device: Any = dist.ProcessGroupGloo.create_device(hostname=address)

    def create(store: Store, rank: int, size: int, timeout: timedelta) -> object:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [device]
        options._timeout = timeout
        return dist.ProcessGroupGloo(store, rank, size, options)

    dist.Backend.register_backend(SITE_BACKEND, create, devices=["cpu"])
    found = [listener.laddr.port for listener in psutil.Process().net_connections("tcp") if _is_at(listener, address)]
    return int(found[0])


def open_store(address: str) -> tuple[TCPStore, int]:
    """Serve the store in which the ranks of a site meet, on the loopback interface; return it and its port."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port


def _is_at(listener: Any, address: str) -> bool:
    return bool(listener.status == psutil.CONN_LISTEN and listener.laddr.ip == address)


def _connect(backend: str, rank: int, ranks: int, device: torch.device, store: Store) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=COLLECTIVE_SECONDS)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
