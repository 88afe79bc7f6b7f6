"""Models are sent to a Hub by the package's real calls; each failure is one line."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from node.hub import RETRY_SECONDS, HubRepository, HubUploader
from protocol.errors import UnreachableError, UsageError
from protocol.manifest.run import Manifest
from tests.node.hub_server import COMMIT, TOKEN, Hub, serving
from tests.node.model.test_export import manifest, node_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),  # of the package, about its own call
]
NAME = "flock/starlings"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with serving() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.address)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # its storage has a protocol of its own
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setenv("HF_ENDPOINT", served.address)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
        yield served


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "export").mkdir()
    for name, content in (("README.md", b"# starlings\n"), ("config.json", b"{}"), ("model.safetensors", b"\x00" * 99)):
        (tmp_path / "export" / name).write_bytes(content)
    return tmp_path / "export"


def test_all_files_arrive_in_one_commit_with_a_tag_of_the_round(hub: Hub, folder: Path) -> None:
    address = HubRepository.open(NAME, "--push").push(folder, 5)
    assert address == f"{hub.address}/{NAME}/tree/round-5"
    assert hub.files == {file.name: file.read_bytes() for file in folder.iterdir()}
    assert hub.tags == {"round-5": COMMIT} and hub.messages == ["The model of round 5"]
    assert hub.repositories[NAME].get("visibility") != "private"
    assert HubRepository.open(NAME, "--push").push(folder, 5) == address, "again: the repository and the tag exist"


def test_private_repository(hub: Hub, folder: Path) -> None:
    HubRepository.open(NAME, "--push").push(folder, 5, private=True)
    assert hub.repositories[NAME]["visibility"] == "private"


@pytest.mark.parametrize(
    "name", ["starlings", "a/b/c", "/starlings", "flock/", "flock/../x", "fl ock/x", "https://x/y"]
)
def test_name_that_is_no_repository(name: str) -> None:
    with pytest.raises(UsageError, match="--push: .* write it like ORG/NAME"):
        HubRepository.open(name, "--push")


def test_without_a_token_the_line_says_how_to_get_one(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UsageError, match="set HF_TOKEN, or run `hf auth login`"):
        HubRepository.open(NAME, "--push")
    assert hub.calls == []


def test_token_without_the_right_to_write(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(UsageError, match=rf"refuses the token \(401\): it needs the right to write to {NAME}"):
        HubRepository.open(NAME, "--push").push(folder, 5)
    assert hub.files == {}


def test_hub_that_is_out_of_order(hub: Hub, folder: Path) -> None:
    hub.refuses = 418
    with pytest.raises(UnreachableError, match="answers 418 .*out of order.*try again later") as caught:
        HubRepository.open(NAME, "--push").push(folder, 5)
    assert str(caught.value).isprintable()


def test_hub_that_does_not_take_the_weights(hub: Hub, folder: Path) -> None:
    hub.refuses_objects = True
    with pytest.raises(
        UnreachableError, match="did not take the model: .*model.safetensors.*; try again later"
    ) as caught:
        HubRepository.open(NAME, "--push").push(folder, 5)
    assert str(caught.value).isprintable() and hub.tags == {}


def test_hub_that_does_not_answer(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UnreachableError, match="http://127.0.0.1:9 does not answer"):
        HubRepository.open(NAME, "--push").push(folder, 5)


def murmur(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "node.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, env=os.environ)


def node_with_report(folder: Path) -> Manifest:
    """A node's folder at round 5, and the report of a host at the same round."""
    run = manifest()
    node_folder(folder, run)
    report = {"run_id": run.run_id, "rounds": 5, "contributors": [{}, {}, {}]}
    losses = {"initial_validation_loss": 5.162, "validation_loss": 1.25}
    (folder / "report.json").write_text(json.dumps(report | losses))
    return run


def test_export_pushes_model_card_and_revision(hub: Hub, tmp_path: Path) -> None:
    """One process, as a person types it: the folder is a temporary one, and the card says what the run was."""
    run = node_with_report(tmp_path / "node")
    done = murmur("export", str(tmp_path / "node"), "--push", NAME)
    assert (done.returncode, done.stdout) == (0, f"the model of round 5 is at {hub.address}/{NAME}/tree/round-5\n"), (
        done
    )
    assert {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(
        hub.files
    )
    card = hub.files["README.md"].decode()
    assert f'from_pretrained("{NAME}", revision="round-5")' in card and run.run_id in card
    assert "| peers that contributed | 3 |" in card and "| validation loss, nats per token | 5.162 -> 1.250 |" in card
    assert 'tags: ["murmuration", "decentralized-training"]' in card


def test_card_has_no_figures_of_another_round(tmp_path: Path) -> None:
    from node.model.export import export

    node_with_report(tmp_path / "node")
    report = json.loads((tmp_path / "node" / "report.json").read_text())
    (tmp_path / "node" / "report.json").write_text(json.dumps(report | {"rounds": 6}))
    export(tmp_path / "node", tmp_path / "out")
    assert "validation loss" not in (tmp_path / "out" / "README.md").read_text()


async def test_host_sends_the_final_model_once_and_tries_again_after_a_failure(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "node.hub")
    node_with_report(tmp_path)
    final = {6}
    uploader = HubUploader([tmp_path], NAME, 1_000_000, final.__contains__)
    await uploader.push_if_final(0.0)
    assert hub.calls == [], "round 5 is not the last one"
    final.add(5)
    hub.refuses = 418
    await uploader.push_if_final(1.0)
    assert "answers 418" in caplog.text and hub.files == {}
    hub.refuses = 0
    await uploader.push_if_final(2.0)
    assert hub.files == {}, "it waits before it tries again"
    await uploader.push_if_final(2.0 + RETRY_SECONDS)
    assert hub.tags == {"round-5": COMMIT} and f"is at {hub.address}/{NAME}/tree/round-5" in caplog.text
    calls = len(hub.calls)
    await uploader.push_if_final(9 * RETRY_SECONDS)
    assert len(hub.calls) == calls


def test_manifest_keeps_the_repository_to_the_host() -> None:
    run = manifest()
    hosted = Manifest.model_validate(run.model_dump(by_alias=True) | {"host": {"hub": NAME}})
    assert hosted.run_id == run.run_id and NAME in hosted.to_toml()
    assert NAME not in hosted.published().to_toml() and "[host]" not in run.to_toml()
    with pytest.raises(ValueError, match='write a repository like "ORG/NAME"'):
        Manifest.model_validate(run.model_dump(by_alias=True) | {"host": {"hub": "starlings"}})
