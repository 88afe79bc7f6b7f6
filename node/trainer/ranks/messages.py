"""The messages between rank 0 and another rank."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from node.monitoring.status import DeviceUse
from node.options import SiteShard
from node.trainer.ipc.channel import TrainerConfig
from protocol.manifest.sections import TrainSection


class _RankMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SiteGroup(_RankMessage):
    """The ranks of several machines, and their addresses (node.trainer.site)."""

    machines: tuple[int, ...] = Field(description="number of ranks by machine")
    shard: SiteShard
    network: str = Field(pattern=r"^127\.[0-9]{1,3}\.[0-9]{1,3}$", description="of the loopback addresses")
    store_port: int

    @property
    def store_address(self) -> str:
        return f"{self.network}.254"

    def address(self, rank: int) -> str:
        """Return the loopback address of a rank."""
        return f"{self.network}.{rank + 1}"

    @property
    def mesh(self) -> list[list[int]]:
        """Return the ranks by copy of the model, each copy in parts."""
        ranks = sum(self.machines)
        size = self.machines[0] if self.shard == "machine" else ranks
        return [list(range(first, first + size)) for first in range(0, ranks, size)]


class RankConfig(_RankMessage):
    """The first message: the trainer's config, and this rank's place in the node."""

    kind: Literal["rank"] = "rank"
    trainer: TrainerConfig
    rank: int = Field(ge=1)
    devices: tuple[str, ...] = Field(description="by rank")
    microbatch: int = Field(ge=1)
    site: SiteGroup | None = Field(default=None, description="None: all ranks are on one machine")


class RankStep(_RankMessage):
    """Make an inner step on a batch of `rows` sequences, which rank 0 broadcasts next."""

    kind: Literal["step"] = "step"
    step: int = Field(ge=0)
    rows: int = Field(ge=1)
    train: TrainSection
    age_at_join: int = Field(ge=0)
    moments_age_at_join: int = Field(ge=0)


class CopyVectors(_RankMessage):
    """Copy weights and optimizer vectors into the shared memory, or from it; answered by Done."""

    kind: Literal["copy"] = "copy"
    direction: Literal["save", "load"]


class ClearVectors(_RankMessage):
    """Set vectors of the optimizer to zero."""

    kind: Literal["clear"] = "clear"
    names: tuple[str, ...]


class MeasureLoss(_RankMessage):
    """Measure the loss of a round's anchor on batches of `rows` sequences, which rank 0 broadcasts."""

    kind: Literal["measure"] = "measure"
    round: int = Field(ge=0)
    rows: tuple[int, ...]


class MeasureDevice(_RankMessage):
    """Measure the use of this rank's device; answered by Done."""

    kind: Literal["device"] = "device"


class Meet(_RankMessage):
    """Connect with the other ranks, all of which listen."""

    kind: Literal["meet"] = "meet"


class EndRank(_RankMessage):
    """Leave the group and exit."""

    kind: Literal["end"] = "end"


class Done(_RankMessage):
    """All earlier commands are done; `use` is the result of MeasureDevice."""

    kind: Literal["done"] = "done"
    use: DeviceUse | None = None


class Listening(_RankMessage):
    """A rank of a site listens at this port of its address."""

    kind: Literal["listening"] = "listening"
    port: int


RankCommand = RankStep | CopyVectors | ClearVectors | MeasureLoss | MeasureDevice | EndRank
TO_RANK: TypeAdapter[RankConfig | Meet | RankCommand] = TypeAdapter(
    Annotated[RankConfig | Meet | RankCommand, Field(discriminator="kind")]
)
FROM_RANK: TypeAdapter[Done | Listening] = TypeAdapter(Annotated[Done | Listening, Field(discriminator="kind")])
