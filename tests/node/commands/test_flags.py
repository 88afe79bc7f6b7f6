"""Flags are declared once; every command has them, and `up` passes all of them on."""

import dataclasses
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

import node.cli
from node.flags import MachineFlags, NodeFlags, expand_flags, to_arguments
from node.options import MachineOptions, NodeOptions, TrainerOptions


def fields(flags: type[MachineFlags]) -> set[str]:
    return {field.name for field in dataclasses.fields(flags)}


def parsed(*words: str) -> NodeFlags:
    """Return the flags that a command parses from these arguments."""
    app, seen = typer.Typer(), list[NodeFlags]()

    @app.command()
    @expand_flags
    def take(run: Annotated[str, typer.Argument()], flags: NodeFlags) -> None:
        assert run == "run.toml"
        seen.append(flags)

    result = CliRunner().invoke(app, ["run.toml", *words])
    assert result.exit_code == 0, result.output
    return seen[0]


def test_every_flag_is_checked_by_an_option_of_its_name() -> None:
    assert fields(MachineFlags) == set(MachineOptions.model_fields)
    assert fields(NodeFlags) == set(NodeOptions.model_fields) - {
        "manifest",
        "base",
        "folder",
        "stays",
        "requires_trust",
    }
    assert set(TrainerOptions.model_fields) <= fields(MachineFlags)


def test_flags_survive_the_round_trip_through_arguments() -> None:
    given = NodeFlags(
        threads=3, memory="2GB", pause_when_busy=True, upload="20mbit", device="cpu", peers=["/a", "/b"], name="me",
        listen=["/c"], direct="off", metrics=":0", log_json=True,
    )  # fmt: skip
    assert parsed(*to_arguments(given)) == given
    assert "--peer /a --peer /b" in " ".join(to_arguments(given))
    assert parsed(*to_arguments(NodeFlags())) == parsed()


@pytest.mark.parametrize("command", ["up", "join", "host"])
def test_commands_have_all_flags(command: str) -> None:
    shown = CliRunner().invoke(node.cli.app, [command, "--help"]).output
    values: dict[str, Any] = dict.fromkeys(fields(MachineFlags), "typed")
    flags = MachineFlags(**values)
    options = [word for word in to_arguments(flags) if word.startswith("--")]
    assert len(options) == len(fields(MachineFlags))
    assert all(option in shown for option in options)
