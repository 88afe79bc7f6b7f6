"""The stage of a server, with the exact sizes of the inputs that it takes."""

from dataclasses import dataclass

from protocol.manifest.run import RunId
from protocol.pipeline.messages import Direction, Input


@dataclass(frozen=True)
class StageSettings:
    """The settings of the server of a stage.

    Args:
        stage: position among `stages`.
        step_size: microbatches in an inner step.
        memory: bytes of activations that the server may hold.
        needs_tokens: each stage needs the tokens, not only the first and the last.
    """

    run: RunId
    stage: int
    stages: int
    activation_bytes: int
    token_bytes: int
    step_size: int
    memory: int
    needs_tokens: bool = False

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def input_bytes(self, direction: Direction) -> dict[Input, int]:
        """Return the sizes of the inputs that a task must have, by name."""
        sizes: dict[Input, int] = {} if self.is_first else {"activation": self.activation_bytes}
        if self.is_first or self.is_last or self.needs_tokens:
            sizes["tokens"] = self.token_bytes
        if direction == "backward" and not self.is_last:
            sizes["gradient"] = self.activation_bytes
        return sizes

    def result_bytes(self, direction: Direction) -> int:
        has_result = not self.is_last if direction == "forward" else not self.is_first
        return self.activation_bytes if has_result else 0

    def task_bytes(self, direction: Direction) -> int:
        """Return the memory that a task needs if no input is there yet."""
        return sum(self.input_bytes(direction).values()) + self.result_bytes(direction)
