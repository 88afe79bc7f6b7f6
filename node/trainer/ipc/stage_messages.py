"""The messages between a daemon and a trainer that serves one stage of a pipeline.

The trainer executes the daemon's commands in order; inputs and outputs are in slots of the activation memory. A trainer
that dies loses the gradients of its open step, so the daemon starts a new life of the stage with each Ready.

Each command names the start of the trainer whose Ready the daemon has received. A restarted trainer ignores commands
meant for its predecessor: the daemon has reused their slots.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeFloat, NonNegativeInt

from protocol.pipeline.messages import Input
from protocol.pipeline.server_events import Compute

Slot = Annotated[int, Field(ge=0, description="number of a slot of the activation memory")]
StageFault = Literal["", "wrong input", "overflow", "other round"]


class _StageMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Command(_StageMessage):
    start: NonNegativeInt = Field(default=0, description="number of the trainer's start for which the command is meant")


class DrawMicrobatch(_Command):
    """Write the tokens of the next microbatch of this peer's text into a slot."""

    kind: Literal["draw"] = "draw"
    serial: NonNegativeInt
    slot: Slot
    window: NonNegativeInt | None = Field(default=None, description="position in the run's text, for exact steps")


class MicrobatchDrawn(_StageMessage):
    """The tokens of a microbatch fill its slot: int32 (microbatch, context + 1)."""

    kind: Literal["drawn"] = "drawn"
    serial: NonNegativeInt


class ComputeStage(_Command):
    """Run the forward or the backward pass of a microbatch.

    Which slots are given follows from the stage: the first has tokens instead of an activation, the last one tokens as
    well, for the targets, and no gradient; its backward pass begins with the loss.
    """

    kind: Literal["compute stage"] = "compute stage"
    task: NonNegativeInt
    is_backward: bool
    adds: bool = Field(description="count the gradient in the open step; a repeated computation does not")
    activation: Slot | None = None
    tokens: Slot | None = None
    gradient: Slot | None = None
    output: Slot | None = None
    owner: str = Field(default="", description="owner of the microbatch; with the serial, its key in the ledger")
    serial: NonNegativeInt = 0
    loss: NonNegativeFloat | None = Field(default=None, description="loss of the microbatch, where the owner knows it")
    number: NonNegativeInt | None = Field(default=None, description="number of the microbatch in its exact step")
    round: NonNegativeInt = Field(default=0, description="round whose exact step includes this gradient")
    takes_away: bool = Field(default=False, description="subtract the gradient, because another peer counts it too")

    @classmethod
    def of(cls, order: Compute, inputs: Mapping[Input, int], output: int | None, round_number: int) -> Self:
        """Return the command for an order of the stage's server, with the slots of its inputs by name."""
        task = order.task
        return cls(
            task=order.token,
            is_backward=task.direction == "backward",
            adds=order.adds,
            activation=inputs.get("activation"),
            tokens=inputs.get("tokens"),
            gradient=inputs.get("gradient"),
            output=output,
            loss=task.loss,
            owner=task.owner,
            serial=task.serial,
            number=task.number,
            round=round_number,
            takes_away=order.takes_away,
        )


class StageComputed(_StageMessage):
    """The output of a task fills its slot; a fault means that an input is malformed, or that the result overflows."""

    kind: Literal["stage computed"] = "stage computed"
    task: NonNegativeInt
    seconds: NonNegativeFloat
    loss: FiniteFloat | None = None
    fault: StageFault = ""
    wrong: Input | None = Field(default=None, description="the malformed input, where that is the fault")
    clipped: bool = Field(default=False, description="the norm of the gradient was far above the usual")


class TakeStageStep(_Command):
    """Make an inner step with the gradients since the last step; an exact step is a contribution."""

    kind: Literal["stage step"] = "stage step"
    round: NonNegativeInt = 0


class DropStageSum(_Command):
    """Restart the sum of the exact step."""

    kind: Literal["drop sum"] = "drop sum"
    round: NonNegativeInt


class StageStepped(_StageMessage):
    """The step will be made as soon as the round allows; gradients that arrive before then join it."""

    kind: Literal["stage stepped"] = "stage stepped"


StageCommand = DrawMicrobatch | ComputeStage | TakeStageStep | DropStageSum
