"""The shape table: arithmetic, names, hash, views."""

import pytest
import torch

from node.model import ShapeTable, shape_table
from protocol.manifest.model import ModelSection

SMALL = ModelSection(vocabulary=16, width=8, layers=2, heads=2, kv_heads=1, hidden=12, context=8)


def test_table_of_a_small_model_written_out() -> None:
    table = shape_table(SMALL.model_copy(update={"layers": 1}))
    assert table.entries == (
        ("model.embed_tokens.weight", (16, 8)),
        ("model.layers.0.self_attn.q_proj.weight", (8, 8)),
        ("model.layers.0.self_attn.k_proj.weight", (4, 8)),
        ("model.layers.0.self_attn.v_proj.weight", (4, 8)),
        ("model.layers.0.self_attn.o_proj.weight", (8, 8)),
        ("model.layers.0.mlp.gate_proj.weight", (12, 8)),
        ("model.layers.0.mlp.up_proj.weight", (12, 8)),
        ("model.layers.0.mlp.down_proj.weight", (8, 12)),
        ("model.layers.0.input_layernorm.weight", (8,)),
        ("model.layers.0.post_attention_layernorm.weight", (8,)),
        ("model.norm.weight", (8,)),
    )
    assert table.offsets[:3] == (0, 128, 192)
    assert table.numel == sum(table.sizes) == 128 + 64 + 32 + 32 + 64 + 96 * 3 + 8 * 3


def test_tied_output_stands_once_and_untied_last() -> None:
    tied, untied = shape_table(SMALL), shape_table(SMALL.model_copy(update={"tied": False}))
    assert "lm_head.weight" not in tied.names
    assert untied.entries[:-1] == tied.entries
    assert untied.entries[-1] == ("lm_head.weight", (16, 8))


def test_table_of_a_large_model_costs_nothing() -> None:
    sizes = {"width": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "hidden": 28_672, "context": 8192}
    large = ModelSection.model_validate({"vocabulary": 128_256, "tied": False, **sizes})
    assert shape_table(large).numel == 70_553_706_496  # Llama 3 70B


def test_hash_covers_names_shapes_and_order() -> None:
    table = ShapeTable((("a", (2, 3)), ("b", (6,))))
    others = [
        ShapeTable((("a", (2, 3)), ("c", (6,)))),
        ShapeTable((("a", (3, 2)), ("b", (6,)))),
        ShapeTable((("b", (6,)), ("a", (2, 3)))),
        ShapeTable((("a", (2, 3)),)),
    ]
    hashes = {table.hash(), *(other.hash() for other in others)}
    assert len(hashes) == 5
    assert all(len(digest) == 32 for digest in hashes)
    assert table.hash() == ShapeTable((("a", (2, 3)), ("b", (6,)))).hash()


def test_hash_never_changes() -> None:
    """Peers of different versions must agree on it: a change here parts them."""
    assert shape_table(SMALL).hash().hex() == "aa82e91a50614d20ee82c0f67a3b96bb9eb0998c27a2ee501b94b7dd25b3bfd3"


def test_views_share_the_memory_of_the_flat_vector() -> None:
    table = shape_table(SMALL)
    flat = torch.arange(table.numel, dtype=torch.float32)
    views = table.views(flat)
    assert list(views) == list(table.names)
    assert torch.equal(torch.cat([view.flatten() for view in views.values()]), flat)
    views["model.norm.weight"].zero_()
    assert flat[-8:].abs().sum() == 0


def test_views_refuse_another_length() -> None:
    table = shape_table(SMALL)
    for shape in ((table.numel + 1,), (1, table.numel)):
        with pytest.raises(ValueError, match="has shape"):
            table.views(torch.zeros(shape))


def test_fill_is_the_inverse_of_views() -> None:
    table = shape_table(SMALL)
    flat, other = torch.randn(table.numel, generator=torch.Generator().manual_seed(0)), torch.zeros(table.numel)
    table.copy_named(other, table.views(flat))
    assert torch.equal(flat, other)


def test_fill_refuses_other_names_and_shapes() -> None:
    table = ShapeTable((("a", (2, 3)), ("b", (6,))))
    flat = torch.zeros(12)
    with pytest.raises(ValueError, match="parameters differ"):
        table.copy_named(flat, {"a": torch.zeros(2, 3)})
    with pytest.raises(ValueError, match="b has shape"):
        table.copy_named(flat, {"a": torch.zeros(2, 3), "b": torch.zeros(1)})  # 1 element would be broadcast
