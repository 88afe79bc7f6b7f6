"""Tokens see their own document only, whichever way attention is computed."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from node.data.source import require_document_end
from node.model import LanguageModel, build_model, initial_weights
from node.model.decoders.decoder import (
    BlockDocuments,
    CausalAttention,
    CompiledCausalAttention,
    Decoder,
    DenseDocuments,
)
from protocol.errors import DataError, ManifestError
from protocol.manifest.model import ModelSection
from protocol.manifest.reading import load_manifest, manifest_of_values
from protocol.manifest.sections import DataSection
from tests.node.data.test_source import write_tokenizer

torch.set_num_threads(1)
END = 0
SHAPES = [
    ModelSection(vocabulary=32, width=32, layers=2, heads=2, kv_heads=1, hidden=24, context=24, document_end=END),
    ModelSection(kind="qwen3", vocabulary=32, width=32, layers=2, heads=2, hidden=24, context=24, document_end=END),
    ModelSection(
        kind="qwen3-moe", vocabulary=32, width=32, layers=2, heads=2, hidden=24, context=24, document_end=END,
        experts=4, experts_per_token=2,
    ),
]  # fmt: skip
LENGTHS = (7, 1, 9, 7)  # of documents, each with the token before it


def ready(config: ModelSection) -> LanguageModel:
    model, weights = build_model(config), initial_weights(config, 3)
    model.load_flat(weights + 0.2 * torch.randn(weights.shape, generator=torch.Generator().manual_seed(1)))
    return model


def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(1, 32, (1, length), generator=generator) for length in LENGTHS]
    for text in texts[1:]:
        text[0, 0] = END
    return texts


def alone(model: LanguageModel) -> Tensor:
    return torch.cat([model(text) for text in documents()], dim=1)


@pytest.mark.parametrize("config", SHAPES, ids=lambda config: config.kind)
def test_packed_documents_have_the_logits_of_each_alone(config: ModelSection) -> None:
    model, packed = ready(config), torch.cat(documents(), dim=1)
    with torch.no_grad():
        assert torch.allclose(model(packed), alone(model), atol=1e-5)
        crossing = ready(config.model_copy(update={"document_end": None}))
        assert not torch.allclose(crossing(packed), alone(crossing), atol=0.1), "the negative control"
        assert torch.equal(crossing(packed[:, :7]), model(packed[:, :7])) or config.kv_heads != config.heads


class BlockAttention(CausalAttention):
    """Skips blocks, as on an accelerator."""

    def document_attention(self, end: int, device: torch.device | str, head_width: int) -> BlockDocuments:
        return BlockDocuments(end, flex_attention)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_skipping_blocks_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU there is no backward pass of it."""
    packed, plain = torch.cat([torch.cat(order, dim=1) for order in (documents(), documents()[::-1])]), ready(SHAPES[0])
    monkeypatch.setattr(Decoder, "attention_type", BlockAttention)
    with torch.no_grad():
        assert torch.allclose(ready(SHAPES[0])(packed), plain(packed), atol=1e-5)


def test_attention_for_the_compiler_has_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    windows, plain = torch.cat(documents(), dim=1), ready(SHAPES[0])
    monkeypatch.setattr(Decoder, "attention_type", CompiledCausalAttention)
    other = ready(SHAPES[0])
    for model in (plain, other):
        model.attach_gradient()
        model(windows[:, :-1], windows[:, 1:]).backward()
    assert torch.allclose(plain.attach_gradient(), other.attach_gradient(), atol=1e-5)


def test_token_that_ends_a_document_opens_the_next_one() -> None:
    attention = DenseDocuments(END)
    attention.see(torch.tensor([[5, 6, END, 7, END, 8]]))
    seen = [[0], [0, 1], [2], [2, 3], [4], [4, 5]]
    assert [torch.nonzero(row).flatten().tolist() for row in attention.mask[0, 0]] == seen


def test_documents_that_end_otherwise_are_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json")
    model, data = SHAPES[0], DataSection(source="python-stdlib", tokenizer="tokenizer.json")
    require_document_end(model, data, tmp_path)
    require_document_end(model.model_copy(update={"document_end": None}), DataSection(source="text"), tmp_path)
    with pytest.raises(DataError, match=r"model.document_end is 3, but tokenizer.json .* token 0; write 0"):
        require_document_end(model.model_copy(update={"document_end": 3}), data, tmp_path)
    with pytest.raises(DataError, match="needs a tokenizer with an end-of-text token"):
        require_document_end(model, DataSection(source="python-stdlib"), tmp_path)


def test_manifest_refuses_stages_and_ids_above_the_vocabulary() -> None:
    run = load_manifest(Path(__file__).parents[4] / "configs" / "test.toml")
    values = run.model_dump(mode="json", exclude_none=True)
    for end, stages, words in (
        (256, 1, "document_end must be below vocabulary"),
        (5, 2, "document_end needs pipeline.stages = 1"),
    ):
        model = values["model"] | {"document_end": end, "tied": False, "layers": 2}
        with pytest.raises(ManifestError, match=words):
            manifest_of_values(values | {"model": model, "pipeline": {"stages": stages}}, "m")
    kept = manifest_of_values(values | {"model": values["model"] | {"document_end": 5}}, "m")
    assert kept.model.document_end == 5 and kept.run_id != run.run_id
