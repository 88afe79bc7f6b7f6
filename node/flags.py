"""Command-line flags that `up`, `join` and `host` share; each is declared once, as a field.

A field becomes an option of every command that takes its class (`expand_flags`). The field of the same name in
`node.options` checks it, and `up` passes it on to the peers that it starts (`to_arguments`). This module imports
nothing heavy, so that `murmur --help` is immediate.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_type_hints

import typer
from typer.models import OptionInfo


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineFlags:
    """Limits on the resources of this machine for a trainer and its daemon, as typed. `None` means not given."""

    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads per trainer (default: all cores, divided among the peers of `up`)"),
    ] = None
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="memory per trainer, such as 4GB; microbatches shrink to fit")
    ] = None
    memory_mode: Annotated[
        Literal["normal", "small"] | None,
        typer.Option(help="small: half the memory, by 8-bit moments and a file on disk (default: as the run says)"),
    ] = None
    compile: Annotated[
        bool, typer.Option("--compile", help="compile the model: faster steps in bf16, after a longer start")
    ] = False
    recompute: Annotated[
        Literal["none", "selective", "full"] | None,
        typer.Option(help="keep fewer activations and compute them again: larger microbatches fit, steps are slower"),
    ] = None
    weights: Annotated[
        Literal["fp32", "bf16"] | None,
        typer.Option(help="keep weights and gradient on a card in this type; bf16 takes half, rounded stochastically"),
    ] = None
    fp8: Annotated[
        bool, typer.Option("--fp8", help="multiply the matrices of the layers in fp8, on an NVIDIA card from 2022 on")
    ] = False
    pause_when_busy: Annotated[
        bool, typer.Option("--pause-when-busy", help="pause training while other programs use the device")
    ] = False
    upload: Annotated[str | None, typer.Option(metavar="RATE", help="upload limit, such as 20mbit or 2.5MB")] = None
    download: Annotated[str | None, typer.Option(metavar="RATE", help="download limit")] = None
    disk: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="disk space of a node's directory (default: half of the free)"),
    ] = None
    log: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="also log metrics with this package: tensorboard or wandb (repeatable)"),
    ] = None
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="device to train on: auto, cpu, cuda, cuda:1, all (cards), or mps")
    ] = "auto"
    devices: Annotated[str | None, typer.Option(metavar="LIST", help="train on these cards together, such as 0,1")] = (
        None
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeFlags(MachineFlags):
    """The flags of a node that runs in this process."""

    peers: Annotated[
        list[str] | None, typer.Option("--peer", metavar="MULTIADDR", help="connect to this peer first (repeatable)")
    ] = None
    name: Annotated[str, typer.Option(help="public name of this node")] = ""
    listen: Annotated[
        list[str] | None,
        typer.Option(metavar="MULTIADDR", help="listen address (repeatable; default: all, IPv4 and IPv6)"),
    ] = None
    direct: Annotated[
        str,
        typer.Option(
            metavar="PORT|off", help="port of direct TLS connections on the hosts of --listen; 0 picks a free one"
        ),
    ] = "0"
    metrics: Annotated[str, typer.Option(metavar="ADDR", help="address of /metrics; port 0 picks a free one")] = (
        "127.0.0.1:0"
    )
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="log the details of each round, and whole peer ids")
    ] = False
    trust: Annotated[
        str | None, typer.Option(metavar="POINT", help="the run passes through this point, which `murmur status` shows")
    ] = None
    stage: Annotated[
        str | None,
        typer.Option(metavar="N|all", help="stage to serve in a run that is cut, from 0 on (default: the weakest)"),
    ] = None
    own_loop: Annotated[
        bool,
        typer.Option("--own-loop", help="wait for a training loop of yours (murmuration.join) instead of training"),
    ] = False
    site: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="wait there for other machines (`murmur rank`), to train as one peer"),
    ] = None
    site_shard: Annotated[
        Literal["machine", "all"],
        typer.Option(help="machine: a copy of the model on each machine of a site; all: one copy over all of them"),
    ] = "machine"
    accept_jump: Annotated[
        bool, typer.Option("--accept-jump", help="follow a preferred chain although many rounds of ours get lost")
    ] = False
    log_json: Annotated[bool, typer.Option("--log-json", help="write log lines as JSON")] = False


def expand_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of `command` that is a class of flags by one keyword parameter per field."""
    parameters: list[inspect.Parameter] = []
    classes: dict[str, Any] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if dataclasses.is_dataclass(parameter.annotation):
            classes[parameter.name] = parameter.annotation
            parameters += _field_parameters(parameter.annotation)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    def expanded(**values: Any) -> None:
        for name, flags in classes.items():
            values[name] = flags(**{field.name: values.pop(field.name) for field in dataclasses.fields(flags)})
        command(**values)

    expanded.__name__ = command.__name__
    expanded.__doc__ = command.__doc__
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return expanded


def to_arguments(flags: MachineFlags) -> list[str]:
    """Return the flags as command-line arguments."""
    arguments: list[str] = []
    hints = get_type_hints(type(flags), include_extras=True)
    for field in dataclasses.fields(flags):
        option, value = _option_name(field.name, hints[field.name]), getattr(flags, field.name)
        if value is True:
            arguments.append(option)
        elif value is not None and value is not False:
            for item in value if isinstance(value, list) else [value]:
                arguments += [option, str(item)]
    return arguments


def _field_parameters(flags: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(flags, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(flags)
    ]


def _option_name(field: str, hint: Any) -> str:
    """Return the option's name from the field's typer.Option, which typer keeps as `default` in an Annotated."""
    declared = (mark.default for mark in hint.__metadata__ if isinstance(mark, OptionInfo))
    named = next((name for name in declared if isinstance(name, str)), field.replace("_", "-"))
    return f"--{named.removeprefix('--')}"
