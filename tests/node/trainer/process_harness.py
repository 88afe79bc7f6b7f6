"""A tiny run for tests with real trainer processes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from node.from_manifest import build_node_program
from node.model import initial_weights
from node.options import TrainerOptions
from node.trainer.ipc.channel import FromTrainer, TrainerConfig
from node.trainer.ipc.shared_memory import SharedLayout, SharedMemory
from node.trainer.ipc.trainer_process import TrainerProcess
from protocol.manifest.reading import parse_manifest
from protocol.manifest.run import Manifest

torch.set_num_threads(1)
DEADLINE = 60.0
M = TypeVar("M")
TOML = """
[run]
name = "tiny"
seed = 1
[model]
vocabulary = 256
width = 16
layers = 1
heads = 2
hidden = 32
context = 16
[data]
source = "text"
path = "*.txt"
[train]
batch_tokens = 64
microbatch = 2
learning_rate = {learning_rate}
[method]
recipe = "{recipe}"
[method.schedule]
inner_steps = {inner_steps}
ahead = {ahead}
delay = {delay}
"""


class ProcessHarness:
    """A manifest, its text, an arena with anchor 0, and the trainer process on it."""

    def __init__(
        self,
        folder: Path,
        recipe: str = "sparseloco",
        inner_steps: int = 20,
        ahead: int = 20,
        delay: int = 0,
        learning_rate: float = 1e-2,
        **own: object,
    ) -> None:
        """`own`: fields of TrainerConfig, and of the options in it."""
        self.folder = folder
        self._own = own
        (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
        (folder / "b.txt").write_text("pack my box with five dozen liquor jugs\n" * 200)
        toml = TOML.format(
            recipe=recipe, inner_steps=inner_steps, ahead=ahead, delay=delay, learning_rate=learning_rate
        )
        self.manifest: Manifest = parse_manifest(toml.encode(), "test")
        mode: Any = own.get("memory_mode", "normal")
        self.program = build_node_program(self.manifest, mode)
        self.arena = SharedMemory.create(SharedLayout.of(self.program), folder)
        self.arena.anchor(0).copy_(initial_weights(self.manifest.model, 0))
        self.trainer = TrainerProcess(self.arena, self.config())
        self.seen: list[FromTrainer] = []
        self._messages: AsyncIterator[FromTrainer] = self.trainer.messages()

    def config(self) -> TrainerConfig:
        values: dict[str, object] = {
            "manifest": self.manifest.to_toml(),
            "base": str(self.folder),
            "peer_id": "12D3KooWtest",
            "round": 0,
            "validation_tokens": 512,
        }
        options: dict[str, object] = {"threads": 1} | ({} if "devices" in self._own else {"device": "cpu"})
        for name, value in self._own.items():
            (options if name in TrainerOptions.model_fields else values)[name] = value
        return TrainerConfig.model_validate({**values, "options": options})

    async def until(self, kind: type[M], deadline: float = DEADLINE) -> M:
        """The next message of that kind; those before it are kept in `seen`."""
        async with asyncio.timeout(deadline):
            async for message in self._messages:
                self.seen.append(message)
                if isinstance(message, kind):
                    return message
        raise AssertionError(f"the trainer ended before it said {kind.__name__}")

    async def close(self) -> None:
        await self.trainer.stop()
        self.arena.close()
