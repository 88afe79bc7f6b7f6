"""The options that `murmur join` passes to the node."""

import io
from dataclasses import replace
from pathlib import Path

import pytest

from node.commands.join import command
from node.commands.join.invitation import Invitation, save_invitation
from node.daemon import lifecycle
from node.flags import NodeFlags
from node.monitoring.display import Display
from node.options import NodeOptions
from protocol.errors import ManifestError, MissingFileError, UnreachableError
from protocol.identity import Identity
from protocol.signing import sign_manifest
from protocol.transport.nat import listen_on_all_interfaces
from tests.node.small_run import MANIFEST

RUN = MANIFEST.model_copy(update={"model": MANIFEST.model.model_copy(update={"vocabulary": 256})})  # bytes
FLAGS = NodeFlags(device="cpu", name="me", threads=2, metrics=":0")


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[NodeOptions]:
    settings: list[NodeOptions] = []

    async def run_node(given: NodeOptions, display: Display, beside: object) -> None:
        settings.append(given)

    monkeypatch.setattr(lifecycle, "run_node", run_node)
    monkeypatch.setattr(command, "configure_logs", lambda as_json, verbose: Display(io.StringIO()))
    write_text(tmp_path)
    return settings


def write_text(folder: Path) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "text.txt").write_text("words to train on\n" * 500)


def test_text_is_shown_before_the_node_starts(
    started: list[NodeOptions], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run = tmp_path / "run.toml"
    run.write_text(RUN.to_toml())
    command.join_run(str(run), FLAGS, folder=tmp_path / "node")
    assert started and 'data: 1 document, 9.0k tokens; sample: "words to train on words' in caplog.text


def test_node_without_the_text_does_not_start(started: list[NodeOptions], tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(RUN.to_toml())
    (tmp_path / "text.txt").unlink()
    with pytest.raises(MissingFileError, match=r"no file matches data.path '\*.txt'"):
        command.join_run(str(run), FLAGS, folder=tmp_path / "node")
    assert not started


def test_paths_are_resolved_and_node_listens_on_all_interfaces(started: list[NodeOptions], tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(RUN.to_toml())
    command.join_run(str(run), FLAGS, folder=tmp_path / "a" / ".." / "b")
    command.join_run(str(run), replace(FLAGS, listen=["/ip4/127.0.0.1/tcp/1"]))
    assert started[0].manifest == RUN and started[0].base == tmp_path.resolve()
    assert started[0].folder == tmp_path.resolve() / "b"
    assert started[0].listen == listen_on_all_interfaces() and started[1].listen == ("/ip4/127.0.0.1/tcp/1",)
    assert started[1].folder.is_absolute()


def test_run_that_cannot_pay_is_named_in_one_line(
    started: list[NodeOptions], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run.toml"
    run.write_text(RUN.to_toml())
    command.join_run(str(run), FLAGS, folder=tmp_path / "node")
    assert sum(message.startswith("typical volunteers can use 0.0") for message in caplog.messages) == 1
    caplog.clear()
    paying = RUN.model_copy(update={"train": RUN.train.model_copy(update={"batch_tokens": 2**24})})
    run.write_text(paying.to_toml())
    command.join_run(str(run), FLAGS, folder=tmp_path / "other")
    assert len(started) == 2 and not [message for message in caplog.messages if "typical volunteers" in message]


def test_missing_manifest_is_refused(started: list[NodeOptions], tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        command.join_run(str(tmp_path / "none.toml"), FLAGS)
    assert not started


def test_unknown_method_fails_before_the_folder_is_locked(started: list[NodeOptions], tmp_path: Path) -> None:
    """The organiser's key is not saved either."""
    method = RUN.method.model_copy(update={"recipe": "dilocco"})
    run = tmp_path / "run.toml"
    run.write_bytes(sign_manifest(RUN.model_copy(update={"method": method}), Identity.create()))
    with pytest.raises(ManifestError, match="did you mean 'diloco'"):
        command.join_run(str(run), FLAGS, folder=tmp_path / "node")
    assert not started and not (tmp_path / "node").exists()


def test_node_resumes_although_the_host_is_gone(
    started: list[NodeOptions], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, folder = "http://127.0.0.1:9/run.toml", tmp_path / "node"

    def join_again() -> None:
        command.join_run(url, FLAGS, folder=folder)

    with pytest.raises(UnreachableError):
        join_again()
    folder.mkdir()
    write_text(folder / "data")
    (folder / "run.toml").write_text(RUN.to_toml())
    save_invitation(folder, Invitation(RUN, Identity.create().peer_id, None, source=url))
    join_again()
    assert started[0].manifest == RUN and started[0].folder == folder
    assert "continuing with the run that was joined from there before" in caplog.text
