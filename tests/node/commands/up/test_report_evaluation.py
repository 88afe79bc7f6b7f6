import math
from pathlib import Path

import pytest
import torch

from node.commands.up.report import evaluate_model, validation_losses
from node.daemon.checkpoints.checkpoint import Checkpoint, SavedChain, save
from node.data import open_corpus, validation_batches
from node.data.batches import VALIDATION_TOKENS
from node.model import build_model, initial_weights, shape_table
from protocol.errors import CheckpointError
from protocol.manifest.reading import load_manifest
from protocol.manifest.run import Manifest

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Return the manifest of the test run on a text that repeats one line."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("text")
    for index in range(20):
        (folder / f"{index}.txt").write_text("the birds fly as one " * 200)
    given = load_manifest(ROOT / "configs" / "test.toml")
    data = given.data.model_copy(update={"source": "text", "path": f"{folder}/*.txt", "validation_share": 0.3})
    return given.model_copy(update={"data": data})


def saved(folder: Path, manifest: Manifest, anchor: torch.Tensor, round_number: int) -> Path:
    """Write a node's folder with one checkpoint."""
    shapes = shape_table(manifest.model)
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(manifest.to_toml())
    checkpoint = Checkpoint(
        run_id=manifest.run_id,
        shapes=shapes.hash(),
        round=round_number,
        digest=bytes(32),
        chain=SavedChain({}, b""),
        anchor=anchor,
        outer={},
        inner={},
        inner_meta={},
    )
    (folder / "checkpoints").mkdir()
    return save(folder / "checkpoints", checkpoint, shapes, keep=2)


def test_losses_equal_those_of_one_token_at_a_time(manifest: Manifest) -> None:
    flat = initial_weights(manifest.model, 0)
    (loss,) = validation_losses(manifest, ROOT, flat)
    model = build_model(manifest.model)
    model.load_flat(flat)
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in validation_batches(open_corpus(manifest.data, ROOT), manifest.model.context, VALIDATION_TOKENS):
            scores = torch.log_softmax(model(batch[:, :-1]).double(), dim=-1)
            total -= scores.gather(2, batch[:, 1:, None]).sum().item()
            count += batch[:, 1:].numel()
    assert loss == pytest.approx(total / count, rel=1e-5)
    assert loss == pytest.approx(math.log(256), abs=0.3)


def test_newest_peer_is_evaluated_and_the_export_is_replaced(manifest: Manifest, tmp_path: Path) -> None:
    flat = initial_weights(manifest.model, 0)
    saved(tmp_path / "peer-0", manifest, flat, round_number=3)
    newest = saved(tmp_path / "peer-1", manifest, torch.zeros_like(flat), round_number=4)
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "old").touch()
    found = evaluate_model(manifest, tmp_path)
    assert found.rounds == 4
    assert found.checkpoint == newest
    assert found.parameters == flat.numel()
    assert found.validation_loss == pytest.approx(math.log(256), abs=1e-4)  # all weights are zero
    assert found.initial_validation_loss != found.validation_loss
    assert (tmp_path / "export" / "model.safetensors").exists()
    assert not (tmp_path / "export" / "old").exists()
    assert found.sample.startswith("The ")
    assert len(found.sample) > 100


def test_missing_checkpoint_is_an_error(manifest: Manifest, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        evaluate_model(manifest, tmp_path)
