"""A line of the metrics of a node, and when the next one is due. Pure."""

import math
from typing import Final

from pydantic import BaseModel, ConfigDict

from node.monitoring.status import NodeStatus

INTERVAL_SECONDS: Final = 30.0  # between two lines of one round


class MetricsLine(BaseModel):
    """The metrics at one moment; `None` means not measured. Losses are in nats a token, bytes count from the start."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    time: float
    round: int
    step: int
    tokens: int
    run_tokens: int
    peers: int
    bytes_sent: int
    bytes_received: int
    loss: float | None = None
    validation_loss: float | None = None
    validation_round: int | None = None
    tokens_per_second: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None

    @classmethod
    def of(cls, status: NodeStatus, now: float) -> "MetricsLine":
        """Return the line of a status; numbers that are not finite are left out."""
        values = {name: getattr(status, name, None) for name in cls.model_fields}
        named = {"time": round(now, 3), "run_tokens": status.chain_tokens}
        finite = {name: None if _is_odd(value) else value for name, value in values.items()}
        return cls.model_validate(finite | named)


def _is_odd(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def is_line_due(newest: MetricsLine | None, now: MetricsLine) -> bool:
    """Return whether to write a line: once a round, and now and then within a long one."""
    if newest is None:
        return now.round > 0 or now.step > 0
    if now.round != newest.round:
        return True
    return now.step != newest.step and now.time - newest.time >= INTERVAL_SECONDS


def is_new(newest: MetricsLine | None, now: MetricsLine) -> bool:
    """Return whether the last line of a node says more than the one before."""
    if newest is None:
        return now.round > 0 or now.step > 0
    return now.model_copy(update={"time": newest.time}) != newest
