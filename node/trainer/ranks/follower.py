"""The loop of a rank besides the first."""

import os
from collections.abc import Sequence
from typing import Final

import torch

from node.from_manifest import build_program
from node.trainer.devices.device import limit_memory, measure_device_use
from node.trainer.ipc.frames import FrameSocket
from node.trainer.ipc.shared_layout import SharedLayout
from node.trainer.ipc.shared_memory import SharedMemory
from node.trainer.ranks.group import RankGroup, listen_for_ranks
from node.trainer.ranks.messages import TO_RANK, CopyVectors, Done, EndRank, Listening, MeasureDevice, Meet, RankConfig
from node.trainer.ranks.rank import Rank
from protocol.manifest.reading import parse_manifest

MEET_SECONDS: Final = 120.0  # until all ranks have imported torch and listen


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
