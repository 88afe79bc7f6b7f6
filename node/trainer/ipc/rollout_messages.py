"""Messages between a daemon and its trainer about rollouts; both sides are in `node.trainer.ipc.channel`."""

from typing import Literal

from pydantic import Base64Bytes, BaseModel, ConfigDict, Field, FiniteFloat

from protocol.identity import PeerId


class _RolloutMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RolloutsWanted(_RolloutMessage):
    """The trainer can take `count` groups more; it gets the oldest of the daemon's pool whose weights it has."""

    kind: Literal["rollouts wanted"] = "rollouts wanted"
    count: int = Field(ge=1)


class RolloutFound(_RolloutMessage):
    """A group that the daemon has checked: `RolloutGroup` on the wire."""

    kind: Literal["rollout"] = "rollout"
    maker: PeerId
    body: Base64Bytes


class GroupVerdict(_RolloutMessage):
    """The fate of one group: its mean score and its tokens, or why it was refused."""

    maker: PeerId
    round: int
    serial: int
    age: int = Field(ge=0, description="rounds")
    refusal: str = ""
    is_proof: bool = Field(default=False, description="no honest maker draws such a group")
    is_unchecked: bool = Field(default=False, description="its weights are not here any more, so nobody is to blame")
    reward: FiniteFloat
    tokens: int
    answers: int


class RolloutSample(_RolloutMessage):
    """An answer with its score, for people."""

    maker: PeerId
    question: str
    answer: str
    reward: FiniteFloat


class RolloutsJudged(_RolloutMessage):
    """The groups of one step.

    `skipped`: groups without variance. `entropy`: nats a token. `mismatch`, `effective` and `clipped` are those of
    `optim.rollouts.PolicyMetrics`.
    """

    kind: Literal["rollouts judged"] = "rollouts judged"
    verdicts: tuple[GroupVerdict, ...]
    skipped: int
    entropy: FiniteFloat
    mismatch: FiniteFloat
    effective: FiniteFloat
    clipped: FiniteFloat
    samples: tuple[RolloutSample, ...] = ()
