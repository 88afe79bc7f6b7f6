"""The node that a training loop starts: the words of its command line."""

from collections.abc import Sequence
from pathlib import Path

import pytest

import murmuration
from murmuration import joining
from node.model import build_model
from tests.swarm.process_swarm import manifest_with


class StopError(Exception):
    pass


def test_loggers_reach_the_command_line_of_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []

    class FakeNodeProcess:
        def __init__(self, folder: Path) -> None:
            self.folder = folder

        def connect(self, run: str, arguments: Sequence[str]) -> None:
            called.append(list(arguments))
            raise StopError

    monkeypatch.setattr(joining, "NodeProcess", FakeNodeProcess)
    manifest = manifest_with()
    (tmp_path / "run.toml").write_text(manifest.to_toml())
    with pytest.raises(StopError):
        murmuration.join(
            tmp_path / "run.toml",
            build_model(manifest.model),
            folder=tmp_path / "node",
            arguments=["--name", "mary"],
            log=["tensorboard", "wandb"],
        )
    assert called == [["--name", "mary", "--log", "tensorboard", "--log", "wandb"]]
