"""The messages between a rollout peer and its generator, one line of JSON each."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from node.options import Device
from protocol.rollout_groups import DrawnAnswer, RolloutGroup

MAX_LINE_BYTES = 1 << 26  # of a reply


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GeneratorConfig(_Line):
    """The first line that a generator reads."""

    manifest: str
    base: Path
    maker: str
    device: Device
    threads: int = Field(ge=1)


class DrawRequest(_Line):
    """Draw the groups `serials` with the weights after `round` rounds, which begin the state in the file `state`."""

    round: int
    state: Path
    serials: tuple[int, ...]


class DrawnGroup(_Line):
    """The tokens of each answer with their log probabilities."""

    serial: int
    tokens: tuple[tuple[int, ...], ...]
    log_probabilities: tuple[tuple[float, ...], ...]

    def to_group(self, round_number: int, device: str) -> RolloutGroup:
        answers = zip(self.tokens, self.log_probabilities, strict=True)
        return RolloutGroup(round_number, self.serial, device, tuple(DrawnAnswer(*answer) for answer in answers))


class DrawReply(_Line):
    """The groups, in the order of the request; `lacks_state`: the file was gone before it was read."""

    device: str = ""
    seconds: float = 0.0
    groups: tuple[DrawnGroup, ...] = ()
    lacks_state: bool = False
