"""The messages between a daemon and a trainer that serves one stage of a pipeline.

The daemon says what to compute, in the order of its messages; inputs and outputs are in slots of the activation memory.
A trainer that dies loses the gradients of its open step, so the daemon starts a new life of the stage with each Ready.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeFloat, NonNegativeInt

Slot = Annotated[int, Field(ge=0, description="number of a slot of the activation memory")]
StageFault = Literal["", "not finite"]


class _StageMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DrawMicrobatch(_StageMessage):
    """Write the tokens of the next microbatch of this peer's text into a slot."""

    kind: Literal["draw"] = "draw"
    serial: NonNegativeInt
    slot: Slot


class MicrobatchDrawn(_StageMessage):
    """The tokens of a microbatch fill its slot: int32 (microbatch, context + 1)."""

    kind: Literal["drawn"] = "drawn"
    serial: NonNegativeInt


class ComputeStage(_StageMessage):
    """Run the forward or the backward pass of a microbatch.

    Which slots are given follows from the stage: the first has tokens instead of an activation, the last one tokens as
    well, for the targets, and no gradient; its backward pass begins with the loss.
    """

    kind: Literal["compute stage"] = "compute stage"
    task: NonNegativeInt
    is_backward: bool
    adds: bool = Field(description="count the gradient in the open step; a repeated computation only needs its result")
    activation: Slot | None = None
    tokens: Slot | None = None
    gradient: Slot | None = None
    output: Slot | None = None
    loss: NonNegativeFloat | None = Field(default=None, description="of the microbatch, where the owner knows it")


class StageComputed(_StageMessage):
    """The output of a task fills its slot; a fault means that an input or the output is not finite."""

    kind: Literal["stage computed"] = "stage computed"
    task: NonNegativeInt
    seconds: NonNegativeFloat
    loss: FiniteFloat | None = None
    fault: StageFault = ""


class TakeStageStep(_StageMessage):
    """Make an inner step with the gradients that were added since the last one."""

    kind: Literal["stage step"] = "stage step"


class StageStepped(_StageMessage):
    """The step is made next, or as soon as the round allows; gradients that come in until then join it."""

    kind: Literal["stage stepped"] = "stage stepped"
