"""The peers that a plan assumes: a TOML file with a table [[peer]] for each kind of machine, or typical ones.

[[peer]]
name = "8 GB card"
count = 4
tflops = 10        # TFLOP/s that training reaches, a third to a half of the data sheet's
up = "20mbit"
down = "100mbit"
memory = "8GB"     # of the device that trains
rtt = 50           # milliseconds to the other peers and back
device = "cuda"    # or "cpu"
cores = 8          # that are free for the exchange; by default it is not counted
"""

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationError, field_validator

from node.units import parse_rate, parse_size
from protocol.errors import MissingFileError, UsageError
from protocol.manifest.reading import ManifestText, decode_text, describe_invalid_values, describe_toml_fault
from protocol.manifest.run import Manifest
from protocol.manifest.sections import Section

MAX_FILE_BYTES = 64 * 1024
MAX_KINDS, MAX_PEERS = 64, 10_000
CPU_PARAMETERS: Final = 10_000_000  # with fewer, a round of the default recipe keeps a typical CPU busy


def _rate_of(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError('must be a rate in quotes, such as "20mbit" or "2.5MB"')
    try:
        return parse_rate(value, "")
    except UsageError as error:
        raise ValueError('must be a rate of at least 256kbit, such as "20mbit" or "2.5MB"') from error


def _size_of(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError('must be a size in quotes, such as "8GB"')
    try:
        return float(parse_size(value, ""))
    except UsageError as error:
        raise ValueError('must be a size, such as "8GB"') from error


Rate = Annotated[float, BeforeValidator(_rate_of)]
Size = Annotated[float, BeforeValidator(_size_of)]


class PeerKind(Section):
    """Machines of one kind; rates are in bytes per second, `memory` is in bytes, `rtt` in milliseconds."""

    name: str = Field(min_length=1, max_length=32)
    count: int = Field(default=1, ge=1, le=MAX_PEERS)
    tflops: float = Field(gt=0, le=1e6)
    up: Rate
    down: Rate
    memory: Size
    rtt: float = Field(default=50.0, ge=0, le=60_000)
    device: Literal["cuda", "cpu"] = "cuda"
    cores: float | None = Field(default=None, ge=0.1, le=1024)

    @field_validator("name")
    @classmethod
    def _is_printable(cls, name: str) -> str:
        if not name.isprintable():
            raise ValueError("must be one line without control characters")
        return name

    @property
    def flops(self) -> float:
        """Return operations per second."""
        return self.tflops * 1e12


class PeerFile(Section):
    """The whole file."""

    peer: tuple[PeerKind, ...] = Field(min_length=1, max_length=MAX_KINDS)

    @field_validator("peer")
    @classmethod
    def _are_few(cls, peer: tuple[PeerKind, ...]) -> tuple[PeerKind, ...]:
        if sum(kind.count for kind in peer) > MAX_PEERS:
            raise ValueError(f"has more than {MAX_PEERS} peers in all; lower the counts")
        return peer


TYPICAL: Final[tuple[dict[str, Any], ...]] = (
    {"name": "24 GB card", "count": 2, "tflops": 35.0, "up": "100mbit", "down": "250mbit", "memory": "24GB"},
    {"name": "8 GB card at home", "count": 4, "tflops": 10.0, "up": "20mbit", "down": "100mbit", "memory": "8GB"},
    {"name": "CPU", "count": 2, "tflops": 0.1, "up": "20mbit", "down": "100mbit", "memory": "16GB", "device": "cpu"},
)


def typical_peers(manifest: Manifest, parameters: int) -> tuple[PeerKind, ...]:
    """Return typical volunteers: eight, or the least multiple that starts the run with two peers at each stage.

    A whole model of less than `CPU_PARAMETERS` is one for CPUs: a card takes so little time for a step that it would
    wait for its link, and nobody needs one. `parameters` are those of the whole model.
    """
    one_set = sum(values["count"] for values in TYPICAL)
    count = one_set * -(-max(manifest.run.min_peers, 2 * manifest.pipeline.stages) // one_set)
    if not manifest.pipeline.is_cut and parameters < CPU_PARAMETERS:
        return (PeerKind.model_validate({**TYPICAL[-1], "count": count}),)
    return tuple(PeerKind.model_validate({**values, "count": count // one_set * values["count"]}) for values in TYPICAL)


def load_peers(path: Path) -> tuple[PeerKind, ...]:
    """Read a file of peers. Raises MissingFileError, or ManifestError with the key to change."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise MissingFileError(f"cannot read the peers {path}: {reason}; name an existing file") from error
    text = decode_text(content, str(path))
    if len(content) > MAX_FILE_BYTES:
        raise text.fault(f"a file of peers has at most {MAX_FILE_BYTES} bytes; shorten it")
    return _parse(text)


def _parse(text: ManifestText) -> tuple[PeerKind, ...]:
    try:
        values = json.dumps(tomllib.loads(text.text), default=_refuse_date)
    except RecursionError as error:
        raise text.fault("not valid TOML: nested too deeply") from error
    except ValueError as error:
        raise text.fault(f"not valid TOML: {describe_toml_fault(error)}") from error
    try:
        return PeerFile.model_validate_json(values).peer
    except ValidationError as error:
        raise describe_invalid_values(error, PeerFile, text) from error


def _refuse_date(value: object) -> str:
    raise ValueError(f"no key takes a date or time; put {value} in quotes")
