"""Check the options of one node, which are independent of the run's manifest.

`node.flags` declares the command line; this module validates it and converts amounts to numbers. `node.run_dir`
describes the node's folder.
"""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from node.monitoring.training_log.loggers import is_installed
from node.paths import is_utf8
from node.units import ALL_INTERFACES, multiaddress_fault, parse_host_port, parse_rate, parse_size
from protocol.errors import MalformedError, UsageError
from protocol.fault_words import describe_value, shorten
from protocol.identity import PeerId
from protocol.manifest.run import Manifest
from protocol.manifest.sections import MemoryMode
from protocol.signing import TrustPoint
from protocol.transport.nat import listen_on_all_interfaces

if TYPE_CHECKING:
    from node.flags import MachineFlags, NodeFlags

DEVICE = re.compile(r"^(auto|cpu|cuda|cuda:[0-9]{1,3}|all|mps)\Z")
CARD = re.compile(r"^(?:cuda:)?([0-9]{1,3})\Z")
LISTEN_ON_LOOPBACK = "/ip4/127.0.0.1/tcp/0"
PORT = re.compile(r"^[0-9]{1,5}\Z")
MIN_THREAD_LIMIT = 64
MAX_DEVICES = 64
THREADS_PER_CORE = 4  # more would only wait for each other
OPTION_NAMES = {"peers": "--peer", "folder": "--dir", "base": "RUN"}  # whose field has another name
SiteShard = Literal["machine", "all"]
Options = TypeVar("Options", bound="TrainerOptions")


def _check_device(device: str) -> str:
    if not DEVICE.match(device):
        raise ValueError(f"{shorten(ascii(device))} is not a device; use auto, cpu, cuda, cuda:N, all or mps")
    return device


Device = Annotated[str, AfterValidator(_check_device)]


def _parse_devices(value: object) -> object:
    """Parse "0,1" to ("cuda:0", "cuda:1")."""
    if not isinstance(value, str):
        return value
    names = [name.strip() for name in value.split(",")]
    cards = [CARD.match(name) for name in names]
    if all(cards) and len(set(names)) == len(names):
        return tuple(f"cuda:{int(card[1])}" for card in cards if card)
    if all(name == "cpu" for name in names):
        return tuple(names)
    raise ValueError(f"{shorten(ascii(value))} is not a list of different cards; use 0,1 for the first two, or cpu,cpu")


def _parse_bytes(value: object, info: ValidationInfo) -> object:
    return parse_size(value, f"--{info.field_name}") if isinstance(value, str) else value


class TrainerOptions(BaseModel):
    """The resources that a trainer may use; its daemon passes them on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: Device = "auto"
    devices: Annotated[tuple[Device, ...], BeforeValidator(_parse_devices)] = Field(
        default=(), max_length=MAX_DEVICES, description="a rank on each of them; empty: `device` alone"
    )
    threads: int | None = Field(default=None, ge=1, description="None means as many as there are cores")
    memory: Annotated[int | None, BeforeValidator(_parse_bytes)] = Field(
        default=None, ge=1, description="bytes that the trainer may use; None means no limit"
    )
    memory_mode: MemoryMode | None = Field(default=None, description="None means as the run says")
    compile: bool = Field(default=False, description="compile the model, with matrix products in bf16")
    recompute: Literal["none", "selective", "full"] = Field(
        default="none", description="what layers keep for the backward pass"
    )
    weights: Literal["fp32", "bf16"] = Field(default="fp32", description="type of the weights on an accelerator")
    fp8: bool = Field(default=False, description="multiply the matrices of the layers in fp8, on a card that can")
    pause_when_busy: bool = Field(default=False, description="train only while other programs leave the device alone")

    @field_validator("threads")
    @classmethod
    def _are_few(cls, threads: int | None) -> int | None:
        cores = os.cpu_count() or 1
        if threads is not None and threads > max(MIN_THREAD_LIMIT, THREADS_PER_CORE * cores):
            raise ValueError(f"{threads} threads are too many for {cores} cores; leave the option out to use all cores")
        return threads

    @model_validator(mode="after")
    def _devices_are_given_once(self) -> Self:
        if self.devices and self.device != "auto":
            raise ValueError("--device and --devices exclude each other; remove one")
        return self

    @property
    def thread_count(self) -> int:
        return self.threads or threads_per_process(1)


class MachineOptions(TrainerOptions):
    """The resources that a node may use of its machine and its link."""

    disk: Annotated[int | None, BeforeValidator(_parse_bytes)] = Field(
        default=None, ge=1, description="bytes that the node's folder may take; None means half of the free space"
    )
    log: tuple[Literal["tensorboard", "wandb"], ...] = Field(default=(), description="loggers next to metrics.jsonl")
    upload: float = Field(default=math.inf, gt=0, description="bytes per second, over all connections")
    download: float = Field(default=math.inf, gt=0, description="bytes per second, over all connections")

    @field_validator("upload", "download", mode="before")
    @classmethod
    def _parse_rate(cls, value: object, info: ValidationInfo) -> object:
        return parse_rate(value, f"--{info.field_name}") if isinstance(value, str) else value

    @field_validator("log")
    @classmethod
    def _are_installed(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not is_installed(name):
                raise ValueError(f"the package {name} is not installed; run `pip install 'murmuration[{name}]'`")
        return tuple(dict.fromkeys(names))

    @property
    def for_trainer(self) -> TrainerOptions:
        return TrainerOptions(**{name: getattr(self, name) for name in TrainerOptions.model_fields})


class NodeOptions(MachineOptions):
    """All options of a node."""

    manifest: Manifest
    base: Path = Field(description="folder of the manifest: relative data paths start here")
    folder: Path = Field(description="folder of the node: key, checkpoints, blobs; see node.run_dir")
    peers: tuple[str, ...] = Field(default=(), description="multiaddresses to ask first, before the manifest's")
    name: str = Field(default="", max_length=64, description="shown to other peers; empty: the peer id")
    listen: tuple[str, ...] = Field(default_factory=listen_on_all_interfaces, min_length=1)
    metrics: str = Field(
        default="127.0.0.1:0", description="HOST:PORT, on loopback or on all interfaces; port 0: a free one"
    )
    direct: int | None = Field(
        default=0, ge=0, le=65535, description="port for direct connections; 0: a free one; None: none are accepted"
    )
    trust: TrustPoint | None = Field(default=None, description="the run's chain passes through this point")
    requires_trust: bool = Field(default=True, description="a chain must show that it passes through that point")
    stage: Annotated[int, Field(ge=0)] | Literal["all"] | None = Field(
        default=None, description="of a pipeline; None: what the folder holds, else the weakest"
    )
    own_loop: bool = Field(default=False, description="a training loop of the user makes the steps (murmuration.join)")
    site: str | None = Field(default=None, description="HOST:PORT at which other machines join this node's ranks")
    site_shard: SiteShard = Field(default="machine", description="the devices that share one copy of the model")
    accept_jump: bool = Field(default=False, description="follow a preferred chain that lacks many rounds of ours")
    verbose: bool = False
    log_json: bool = False
    stays: bool = Field(default=False, description="serve the final state after the target, until the node is stopped")

    @field_validator("trust", mode="before")
    @classmethod
    def _parse_trust(cls, value: object) -> object:
        try:
            return TrustPoint.parse(value) if isinstance(value, str) else value
        except MalformedError as error:
            raise ValueError(f"{shorten(ascii(value))} is not a trust point: {error}") from error

    @field_validator("base", "folder")
    @classmethod
    def _is_text(cls, path: Path) -> Path:
        if not is_utf8(path):
            raise ValueError(f"the path {ascii(str(path))} is not UTF-8 text; use another folder")
        return path

    @field_validator("name")
    @classmethod
    def _is_printable(cls, name: str) -> str:
        if not name.isprintable():
            raise ValueError(f"{name!r} has control characters, which other peers reject; remove them")
        return name

    @field_validator("direct", mode="before")
    @classmethod
    def _is_port_or_off(cls, value: object) -> object:
        if value == "off":
            return None
        if isinstance(value, str) and not (PORT.match(value) and int(value) <= 65535):
            raise ValueError(f"{value!r} is not a port; use 0 to 65535, or off")
        return value

    @field_validator("peers", "listen")
    @classmethod
    def _are_multiaddresses(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        for address in addresses:
            if fault := multiaddress_fault(address):
                raise ValueError(f"{shorten(ascii(address))} {fault}")
        return addresses

    @field_validator("peers")
    @classmethod
    def _name_their_peer(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        for address in addresses:
            if "/p2p/" not in address:
                raise ValueError(f"{address} lacks its peer id; append /p2p/ and the id that `murmur key` prints there")
        return addresses

    @field_validator("metrics")
    @classmethod
    def _answers_on_loopback(cls, address: str) -> str:
        host, port = parse_host_port(address, "--metrics")
        if host not in ("127.0.0.1", *ALL_INTERFACES):  # `murmur status` asks on loopback
            raise ValueError(f"{address} is neither loopback (127.0.0.1:{port}) nor all interfaces (0.0.0.0:{port})")
        return address

    @field_validator("site")
    @classmethod
    def _is_site(cls, address: str | None) -> str | None:
        if address is not None and not parse_host_port(address, "--site")[1]:
            raise ValueError("other machines need a fixed port; write it like 10.0.0.1:29400")
        return address

    @property
    def contacts(self) -> tuple[str, ...]:
        """Return the peers that may be asked for the run."""
        return (*self.peers, *self.manifest.run.bootstrap)

    @property
    def contact_ids(self) -> tuple[PeerId, ...]:
        """Return the ids of these peers."""
        return tuple(dict.fromkeys(address.rpartition("/p2p/")[2] for address in self.contacts if "/p2p/" in address))

    @property
    def run_id(self) -> str:
        return self.manifest.run_id


def parse_node_options(
    flags: "NodeFlags", *, manifest: Manifest, base: Path, folder: Path, more_peers: Sequence[str] = ()
) -> NodeOptions:
    """Check a node's command line. Raises UsageError, which names the option."""
    peers = (*(flags.peers or ()), *more_peers)
    manifest = manifest.with_whole_path(base)
    return parse_options(NodeOptions, flags, manifest=manifest, base=base, folder=folder, peers=peers)


def parse_options(kind: type[Options], flags: "MachineFlags", **values: object) -> Options:
    """Check the given flags and other values as options of type `kind`. Raises UsageError."""
    flag_values = {name: value for name, value in asdict(flags).items() if value not in (None, [])}
    try:
        return kind.model_validate(flag_values | values)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        name = str(fault["loc"][0]) if fault["loc"] else "options"
        option = OPTION_NAMES.get(name, f"--{name.replace('_', '-')}")
        raise UsageError(f"{option}: {describe_value(fault)}") from error


def threads_per_process(processes: int) -> int:
    """Return the threads for each of several trainers that share this machine's cores."""
    return max(1, usable_cores() // processes)


def usable_cores() -> int:
    """Return the processors that this process may use; all where the system does not say (macOS)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
