"""The checks of `murmur host` before it starts anything."""

import io
from pathlib import Path

import pytest

from node.dashboard import command
from node.dashboard.command import HostOptions, host
from node.flags import NodeFlags
from node.monitoring.display import Display
from protocol.errors import ManifestError, MissingFileError
from protocol.manifest.sections import DataSection
from tests.node.small_run import MANIFEST


def test_unknown_method_fails_before_the_folder_is_locked(tmp_path: Path) -> None:
    run, folder = tmp_path / "run.toml", tmp_path / "host"
    run.write_text(MANIFEST.to_toml().replace('recipe = "', 'recipe = "x'))
    with pytest.raises(ManifestError, match="did you mean"):
        host(HostOptions(run=run, folder=folder, http="127.0.0.1:0", flags=NodeFlags(device="cpu")))
    assert not folder.exists()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the modes in which hosts were started, and start none."""
    modes: list[str] = []

    def replace(name: str) -> None:
        async def serve(*_: object) -> None:
            modes.append(name)

        monkeypatch.setattr(command, name, serve)

    replace("_host_and_train")
    replace("_host_and_observe")
    monkeypatch.setattr(command, "configure_logs", lambda as_json, verbose: Display(io.StringIO()))
    return modes


def write_run(folder: Path, **data: object) -> Path:
    values = {"data": DataSection.model_validate({"source": "text", "path": "*.txt", **data})}
    model = MANIFEST.model.model_copy(update={"vocabulary": 256})
    (folder / "run.toml").write_text(MANIFEST.model_copy(update={"model": model, **values}).to_toml())
    return folder / "run.toml"


def start(run: Path, train: bool) -> None:
    host(
        HostOptions(run=run, folder=run.parent / "host", http="127.0.0.1:0", train=train, flags=NodeFlags(device="cpu"))
    )


def test_host_that_trains_needs_the_text(tmp_path: Path, served: list[str]) -> None:
    with pytest.raises(MissingFileError, match="no file matches"):
        start(write_run(tmp_path), train=True)
    assert not served
    (tmp_path / "text.txt").write_text("words to train on\n" * 500)
    start(write_run(tmp_path), train=True)
    assert served == ["_host_and_train"]


def test_host_that_watches_says_whether_it_has_the_text(
    tmp_path: Path, served: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    start(write_run(tmp_path), train=False)
    assert "this host does not train and does not have the text: no file matches" in caplog.text
    (tmp_path / "text.txt").write_text("words to train on\n" * 500)
    start(write_run(tmp_path), train=False)
    assert "data: 1 document, 9.0k tokens" in caplog.text and served == 2 * ["_host_and_observe"]


def test_host_that_watches_downloads_no_text(
    tmp_path: Path, served: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(command, "check_and_log_text", lambda *given: asked.append(given))
    start(write_run(tmp_path, source="hf", path="somebody/set"), train=False)
    assert not asked and served == ["_host_and_observe"]
    start(write_run(tmp_path, source="hf", path="somebody/set"), train=True)
    assert len(asked) == 1, "the negative control"


def test_host_of_a_run_that_cannot_pay_says_so_in_one_line(
    tmp_path: Path, served: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    start(write_run(tmp_path), train=False)
    assert served and sum(message.startswith("typical volunteers can use 0.0") for message in caplog.messages) == 1
    caplog.clear()
    run = write_run(tmp_path)
    run.write_text(run.read_text().replace("batch_tokens = 8\n", f"batch_tokens = {2**24}\n"))
    start(run, train=False)
    assert len(served) == 2 and not [message for message in caplog.messages if "typical volunteers" in message]
