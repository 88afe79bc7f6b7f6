"""The messages between a site's first machine and the others: frames of JSON (node.trainer.ipc.channel) over TLS."""

import asyncio
import os
import platform
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from node.options import MAX_DEVICES
from node.trainer.ipc.channel import LENGTH_BYTES, ChannelClosed, Crashed, encode_frame, parse_message
from protocol.errors import MalformedError

MAX_SITE_MESSAGE_BYTES: Final = 64 * 1024
MESSAGE_SECONDS: Final = 10.0
Name = Annotated[str, Field(max_length=128)]
M = TypeVar("M")


class _SiteMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Machine(_SiteMessage):
    """Offer the devices of a machine; the connection stays open for commands."""

    kind: Literal["machine"] = "machine"
    machine: Name = Field(description="random; new for each attempt to join")
    host: Name = Field(description="identifies a loopback interface")
    version: Name = Field(description="versions of torch and Python")
    devices: tuple[Name, ...] = Field(min_length=1, max_length=MAX_DEVICES)
    names: tuple[Name, ...] = Field(min_length=1, max_length=MAX_DEVICES, description="device names, for people")


class RankChannel(_SiteMessage):
    """Open the channel between rank 0 and one rank of a machine."""

    kind: Literal["channel"] = "channel"
    machine: Name
    index: int = Field(ge=0, lt=MAX_DEVICES)


class OpenTunnel(_SiteMessage):
    """Connect to a target of the tunnels."""

    kind: Literal["tunnel"] = "tunnel"
    target: int = Field(ge=0)


class DialedConnection(_SiteMessage):
    """Open the connection that rank 0 requested with Dial."""

    kind: Literal["answer"] = "answer"
    dial: int = Field(ge=0)


class Opening(_SiteMessage):
    """The first message of each connection."""

    secret: str = Field(max_length=64)
    what: Annotated[Machine | RankChannel | OpenTunnel | DialedConnection, Field(discriminator="kind")]


class Welcome(_SiteMessage):
    """The machine is admitted."""

    kind: Literal["welcome"] = "welcome"


class Refused(_SiteMessage):
    """The machine is not admitted, for this reason."""

    kind: Literal["refused"] = "refused"
    reason: str = Field(max_length=400)
    exit_code: int


class Target(_SiteMessage):
    """A listener on the loopback interface of one machine, which tunnels make available on the others."""

    number: int = Field(ge=0)
    host: Name
    address: str = Field(pattern=r"^127(\.[0-9]{1,3}){3}$")
    port: int = Field(ge=1, le=65535)


class Forward(_SiteMessage):
    """Listen for these targets on the loopback interface; the reply is Forwarding."""

    kind: Literal["forward"] = "forward"
    targets: tuple[Target, ...] = Field(max_length=MAX_DEVICES * MAX_DEVICES)


class Forwarding(_SiteMessage):
    """Confirm that the machine listens for the targets."""

    kind: Literal["forwarding"] = "forwarding"


class Dial(_SiteMessage):
    """Connect a target on this machine to rank 0, by a DialedConnection with this number."""

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
    """Return the next message. Raises MalformedError, and ChannelClosed, also after `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
            if length > MAX_SITE_MESSAGE_BYTES:
                raise MalformedError(f"a message of {length} bytes; at most {MAX_SITE_MESSAGE_BYTES}")
            return parse_message(adapter, await reader.readexactly(length))
    except (asyncio.IncompleteReadError, OSError, TimeoutError) as error:
        raise ChannelClosed(str(error) or "no answer in time") from error


def own_host() -> str:
    """Return a name that identifies this loopback interface (boot and network namespace)."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


def own_version(torch_version: str) -> str:
    """Return the versions of torch and Python, which must be equal on all machines."""
    return f"torch {torch_version.partition('+')[0]}, Python {platform.python_version().rpartition('.')[0]}"
