"""The messages of a site's machines to its first one, and back: frames of JSON (node.trainer.ipc.frames) on TLS."""

import asyncio
import os
import platform
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from node.options import MAX_DEVICES
from node.trainer.ipc.channel import Crashed
from node.trainer.ipc.frames import LENGTH_BYTES, ChannelClosed, encode_frame, parse_message
from protocol.errors import MalformedError

MAX_SITE_MESSAGE_BYTES: Final = 64 * 1024
MESSAGE_SECONDS: Final = 10.0
Name = Annotated[str, Field(max_length=128)]
M = TypeVar("M")


class _SiteMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Machine(_SiteMessage):
    """A machine offers its devices; the connection stays for orders."""

    kind: Literal["machine"] = "machine"
    machine: Name = Field(description="random, of this attempt")
    host: Name = Field(description="the same for processes that share a loopback interface")
    version: Name = Field(description="of torch and Python")
    devices: tuple[Name, ...] = Field(min_length=1, max_length=MAX_DEVICES)
    names: tuple[Name, ...] = Field(min_length=1, max_length=MAX_DEVICES, description="of the devices, for people")


class RankChannel(_SiteMessage):
    """The channel between rank 0 and one rank of a machine."""

    kind: Literal["channel"] = "channel"
    machine: Name
    index: int = Field(ge=0, lt=MAX_DEVICES)


class Tunnel(_SiteMessage):
    """A connection to a target of the tunnels."""

    kind: Literal["tunnel"] = "tunnel"
    target: int = Field(ge=0)


class Answer(_SiteMessage):
    """The connection that rank 0 asked for with Dial."""

    kind: Literal["answer"] = "answer"
    dial: int = Field(ge=0)


class Opening(_SiteMessage):
    """The first message of each connection."""

    secret: str = Field(max_length=64)
    what: Annotated[Machine | RankChannel | Tunnel | Answer, Field(discriminator="kind")]


class Welcome(_SiteMessage):
    """The machine may take part."""

    kind: Literal["welcome"] = "welcome"


class Refused(_SiteMessage):
    """The machine may not take part, for this reason."""

    kind: Literal["refused"] = "refused"
    reason: str = Field(max_length=400)
    exit_code: int


class Target(_SiteMessage):
    """A listener on the loopback interface of one machine, which the tunnels offer on the others."""

    number: int = Field(ge=0)
    host: Name
    address: str = Field(pattern=r"^127(\.[0-9]{1,3}){3}$")
    port: int = Field(ge=1, le=65535)


class Forward(_SiteMessage):
    """Offer these targets on the loopback interface; answered by Forwarding."""

    kind: Literal["forward"] = "forward"
    targets: tuple[Target, ...] = Field(max_length=MAX_DEVICES * MAX_DEVICES)


class Forwarding(_SiteMessage):
    """The targets are offered."""

    kind: Literal["forwarding"] = "forwarding"


class Dial(_SiteMessage):
    """Connect this target of yours with rank 0, by an Answer with this number."""

    kind: Literal["dial"] = "dial"
    dial: int = Field(ge=0)
    target: Target


OPENING: TypeAdapter[Opening] = TypeAdapter(Opening)
TO_MACHINE: TypeAdapter[Welcome | Refused | Forward | Dial] = TypeAdapter(
    Annotated[Welcome | Refused | Forward | Dial, Field(discriminator="kind")]
)
FROM_MACHINE: TypeAdapter[Forwarding | Crashed] = TypeAdapter(
    Annotated[Forwarding | Crashed, Field(discriminator="kind")]
)


async def send(writer: asyncio.StreamWriter, message: BaseModel) -> None:
    """Send a message. Raises ChannelClosed."""
    try:
        async with asyncio.timeout(MESSAGE_SECONDS):
            writer.write(encode_frame(message))
            await writer.drain()
    except (OSError, TimeoutError) as error:
        raise ChannelClosed(str(error)) from error


async def receive(reader: asyncio.StreamReader, adapter: TypeAdapter[M], seconds: float | None = MESSAGE_SECONDS) -> M:
    """Return the next message. Raises ChannelClosed, also after `seconds`, and MalformedError."""
    try:
        async with asyncio.timeout(seconds):
            length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
            if length > MAX_SITE_MESSAGE_BYTES:
                raise MalformedError(f"a message of {length} bytes; at most {MAX_SITE_MESSAGE_BYTES}")
            return parse_message(adapter, await reader.readexactly(length))
    except (asyncio.IncompleteReadError, OSError, TimeoutError) as error:
        raise ChannelClosed(str(error) or "no answer in time") from error


def own_host() -> str:
    """Return a name that all processes with this loopback interface share, and no others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


def own_version(torch_version: str) -> str:
    """Return the versions that all machines must have in common."""
    return f"torch {torch_version.partition('+')[0]}, Python {platform.python_version().rpartition('.')[0]}"
