"""/model: the newest model as a tar file, made on demand."""

import asyncio
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
import torch
from starlette.applications import Starlette

from node.daemon.checkpoints.checkpoint import Checkpoint, SavedChain, save
from node.daemon.stored_states import model_archive
from node.daemon.stored_states.model_archive import ModelArchive, model_values
from node.model import shape_table
from node.paths import find_newest_model
from protocol.errors import StorageError
from tests.node.small_run import MANIFEST, RUN_ID, SHAPES


def save_round(folder: Path, number: int) -> None:
    """Write a checkpoint of a node whose weights all have the number of the round."""
    anchor = torch.full((SHAPES.numel,), float(number))
    body = Checkpoint(RUN_ID, SHAPES.hash(), number, bytes(32), SavedChain({"head": {}}, b""), anchor, {}, {}, {})
    save(folder / "checkpoints", body, shape_table(MANIFEST.model), keep=2)


@pytest.fixture
def node_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "node"
    folder.mkdir()
    (folder / "run.toml").write_text(MANIFEST.to_toml())
    return folder


def archive_of(folder: Path, final: int | None = None) -> ModelArchive:
    return ModelArchive((folder,), MANIFEST, lambda number: number == final)


def client_of(archive: ModelArchive) -> httpx2.AsyncClient:
    app = Starlette(routes=[model_archive.model_route(archive)])
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://host")


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Replace the export's process; counts the exports, and how many run at once."""
    seen = SimpleNamespace(count=0, running=0, most=0)

    async def export(self: ModelArchive, node_dir: Path, out: Path) -> int:
        newest = find_newest_model([node_dir])
        assert newest is not None
        seen.running += 1
        seen.most, seen.count = max(seen.most, seen.running), seen.count + 1
        await asyncio.sleep(0.01)
        out.mkdir()
        (out / "config.json").write_text(str(newest[0]))
        seen.running -= 1
        return newest[0]

    monkeypatch.setattr(ModelArchive, "_export", export)
    yield seen


async def test_before_the_first_round_there_is_no_model(node_dir: Path) -> None:
    archive = archive_of(node_dir)
    async with client_of(archive) as client:
        assert (await client.get("/model")).status_code == (await client.head("/model")).status_code == 404
    assert model_values(archive) == model_values(None) == {"model": None}


async def test_archive_is_made_once_a_round_and_named_by_it(node_dir: Path, exports: SimpleNamespace) -> None:
    save_round(node_dir, 4)
    archive = archive_of(node_dir, final=5)
    async with client_of(archive) as client:
        answers = await asyncio.gather(*(client.get("/model") for _ in range(5)))
        assert {answer.status_code for answer in answers} == {200} and (exports.count, exports.most) == (1, 1)
        assert answers[0].headers["content-disposition"].endswith('filename="small-round-4.tar"')
        assert answers[0].headers["etag"] == f'"{RUN_ID[:16]}-4"'
        part = await client.get("/model", headers={"range": "bytes=100-199", "if-range": answers[0].headers["etag"]})
        assert part.status_code == 206 and part.content == answers[0].content[100:200]
        head = await client.head("/model")
        assert (head.status_code, head.headers["murmur-round"], exports.count) == (200, "4", 1)

        save_round(node_dir, 5)
        assert model_values(archive) == {"model": {"round": 5, "size": 4 * SHAPES.numel, "is_final": True}}
        final = await client.get("/model")
        assert final.headers["murmur-round"] == "5", "the final model does not wait"
        assert [path.name for path in (node_dir / "model").iterdir()] == ["small-round-5.tar"]


async def test_run_that_goes_on_is_not_exported_for_every_request(
    node_dir: Path, exports: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_round(node_dir, 1)
    archive = archive_of(node_dir)
    await archive.open()
    save_round(node_dir, 2)
    recent = await archive.open()
    assert recent is not None and (recent.round, exports.count) == (1, 1)
    monkeypatch.setattr(model_archive, "PAUSE_FACTOR", 0.0)
    newer = await archive.open()
    assert newer is not None and newer.round == 2


async def test_too_many_downloads_are_refused_and_free_their_slots(
    node_dir: Path, exports: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_archive, "MAX_DOWNLOADS", 0)
    save_round(node_dir, 1)
    async with client_of(archive_of(node_dir)) as client:
        refused = await client.get("/model")
        assert refused.status_code == 503 and refused.headers["retry-after"] == "30" and exports.count == 0
    monkeypatch.setattr(model_archive, "MAX_DOWNLOADS", 1)
    async with client_of(archive_of(node_dir)) as client:
        assert [(await client.get("/model")).status_code for _ in range(3)] == [200] * 3


async def test_failed_export_says_why_and_leaves_nothing(node_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: ModelArchive, node_dir: Path, out: Path) -> int:
        out.mkdir()
        raise StorageError("cannot export the model: no space left")

    monkeypatch.setattr(ModelArchive, "_export", fail)
    save_round(node_dir, 1)
    (node_dir / "model" / ".making-old").mkdir(parents=True)  # of a process that was killed
    async with client_of(archive_of(node_dir)) as client:
        answer = await client.get("/model")
    assert answer.status_code == 503 and "no space left" in answer.text
    assert list((node_dir / "model").iterdir()) == []


@pytest.mark.slow
async def test_archive_is_a_folder_that_transformers_loads(node_dir: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_round(node_dir, 3)
    async with client_of(archive_of(node_dir)) as client:
        client.timeout = 300.0
        content = (await client.get("/model")).content
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        assert all(not entry.uname and entry.uid == 0 for entry in archive.getmembers())
        archive.extractall(tmp_path / "out", filter="data")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "small-round-3")
    assert float(next(model.parameters()).detach().flatten()[0]) == 3.0
