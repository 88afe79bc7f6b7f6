"""The parts of a node that a pipeline uses."""

from dataclasses import dataclass
from typing import Protocol

from node.daemon.stages.activation_store import ActivationStore
from node.daemon.stages.calls import StageCalls
from node.daemon.stages.node_stages import NodeStages, StageBoard
from node.processes.workers import BackgroundTasks
from node.trainer.ipc.channel import ToTrainer
from protocol.blobs.download import Downloader


class StageTrainer(Protocol):
    """The process that computes; TrainerProcess."""

    async def send(self, message: ToTrainer) -> bool:
        """Send a message; return False if no trainer runs now."""


@dataclass(frozen=True, kw_only=True)
class PipelineParts:
    """The parts of a node and its replica that a pipeline uses."""

    node: NodeStages
    board: StageBoard
    calls: StageCalls
    downloader: Downloader
    activations: ActivationStore
    background: BackgroundTasks
