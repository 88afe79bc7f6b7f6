"""The model: initial weights that are equal everywhere, the parts against naive forms, and that it learns."""

import hashlib
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from node.model import LanguageModel, build_model, initial_weights, shape_table
from node.model.decoders.decoder import RMSNorm, apply_rotary, rotary_tables
from node.model.decoders.family import STANDARD_DEVIATION
from protocol.manifest.model import ModelSection

torch.set_num_threads(1)
SMALL = ModelSection(vocabulary=32, width=16, layers=2, heads=4, hidden=24, context=12)
SHAPES = [
    {},
    {"tied": False},
    {"kv_heads": 2},
    {"kv_heads": 1, "tied": False},
    {"head_size": 6, "norm_epsilon": 0.1},
    {"kind": "qwen3", "kv_heads": 2},
    {"kind": "qwen3-moe", "experts": 4, "experts_per_token": 2},
    {"kind": "qwen3-moe", "experts": 5, "experts_per_token": 1, "normalize_experts": False},
    {"kind": "qwen3", "head_size": 8, "kv_heads": 1, "tied": False, "norm_epsilon": 1e-2},
]


def ready(config: ModelSection, seed: int = 0) -> LanguageModel:
    model = build_model(config)
    model.load_flat(initial_weights(config, seed))
    return model


def tokens_of(config: ModelSection, seed: int, batch: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocabulary, (batch, config.context), generator=generator)


def test_initial_weights_never_change() -> None:
    """Pinned to the bit: two peers with different machines or versions must start from the same anchor."""
    digest = hashlib.sha256(initial_weights(SMALL, 7).numpy().tobytes()).hexdigest()
    assert digest == "1b30e8819926efa9813d7801b88ebe7cf246864ad57ca304681c11ae34db9c40"


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    threads = torch.get_num_threads()
    first = initial_weights(SMALL, 1)
    torch.set_num_threads(4)
    second = initial_weights(SMALL, 1)
    torch.set_num_threads(threads)
    assert torch.equal(first, second)
    assert not torch.equal(first, initial_weights(SMALL, 2))
    deeper = SMALL.model_copy(update={"layers": 3})
    views, deeper_views = shape_table(SMALL).views(first), shape_table(deeper).views(initial_weights(deeper, 1))
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(views[name], deeper_views[name])


def test_initial_weights_are_bells_of_the_right_width() -> None:
    config = ModelSection(width=128, layers=4, heads=4, hidden=344, context=128)
    for name, view in shape_table(config).views(initial_weights(config, 0)).items():
        if view.ndim == 1:
            assert bool((view == 1).all())
            continue
        inner = name.endswith(("o_proj.weight", "down_proj.weight"))
        expected = STANDARD_DEVIATION / math.sqrt(8) if inner else STANDARD_DEVIATION
        assert abs(view.std().item() / expected - 1) < 0.02, name
        assert abs(view.mean().item()) < 4 * expected / math.sqrt(view.numel()), name
        kurtosis = ((view / view.std()) ** 4).mean().item()
        assert 2.5 < kurtosis < 2.9, name  # Irwin-Hall of four: 2.7; a normal: 3; a uniform: 1.8


def test_initial_weights_are_continued_over_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = initial_weights(SMALL, 3)
    monkeypatch.setattr("node.model.random_values.CHUNK_ELEMENTS", 100)
    assert torch.equal(initial_weights(SMALL, 3), whole)


def test_first_loss_is_that_of_guessing() -> None:
    model, tokens = ready(SMALL), tokens_of(SMALL, 0)
    assert abs(model(tokens[:, :-1], tokens[:, 1:]).item() - math.log(32)) < 0.1


@pytest.mark.parametrize("changes", SHAPES)
def test_forward_against_a_naive_reference(changes: dict[str, object]) -> None:
    config = SMALL.model_copy(update=changes)
    model, tokens = ready(config), tokens_of(config, 1)
    flat = torch.randn(model.shapes.numel, generator=torch.Generator().manual_seed(2)) / 4
    model.load_flat(flat)
    expected = naive_logits(config, model.shapes.views(flat.double()), tokens)
    assert torch.allclose(model(tokens).double(), expected, atol=1e-4)
    loss = F.cross_entropy(expected[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert abs(model(tokens[:, :-1], tokens[:, 1:]).item() - loss.item()) < 1e-4


def naive_logits(config: ModelSection, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """The textbook form, one sequence, one head and one position at a time, in fp64."""
    return torch.stack([naive_sequence(config, weights, sequence) for sequence in tokens])


def naive_sequence(config: ModelSection, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    def norm(rows: Tensor, gain: Tensor) -> Tensor:
        return naive_norm(config, rows, gain)

    embedding = weights["model.embed_tokens.weight"]
    rows = embedding[tokens]
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        part = {name[len(prefix) : -len(".weight")]: value for name, value in weights.items() if prefix in name}
        rows = rows + naive_attention(config, part, norm(rows, part["input_layernorm"]))
        inside = norm(rows, part["post_attention_layernorm"])
        rows = rows + (
            naive_mlp(part, "mlp", inside) if config.experts is None else naive_experts(config, part, inside)
        )
    return norm(rows, weights["model.norm.weight"]) @ weights.get("lm_head.weight", embedding).T


def naive_mlp(part: dict[str, Tensor], name: str, rows: Tensor) -> Tensor:
    gate, up = rows @ part[f"{name}.gate_proj"].T, rows @ part[f"{name}.up_proj"].T
    return (gate * torch.sigmoid(gate) * up) @ part[f"{name}.down_proj"].T


def naive_experts(config: ModelSection, part: dict[str, Tensor], rows: Tensor) -> Tensor:
    """Each token alone: its experts by probability, each applied to it and weighted."""
    outputs = []
    for row in rows:
        probabilities = (part["mlp.gate"] @ row).softmax(-1)
        best = sorted(range(len(probabilities)), key=lambda expert: -float(probabilities[expert]))
        chosen = best[: config.experts_per_token]
        total = sum(float(probabilities[expert]) for expert in chosen) if config.normalize_experts else 1.0
        outputs.append(
            sum(
                (probabilities[expert] / total * naive_mlp(part, f"mlp.experts.{expert}", row) for expert in chosen),
                torch.zeros(config.width, dtype=torch.float64),
            )
        )
    return torch.stack(outputs)


def naive_norm(config: ModelSection, rows: Tensor, gain: Tensor) -> Tensor:
    return rows / (rows.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt() * gain


def naive_attention(config: ModelSection, part: dict[str, Tensor], rows: Tensor) -> Tensor:
    size, groups = config.head_size or config.width // config.heads, config.kv_heads or config.heads
    outputs = []
    for head in range(config.heads):
        group = head // (config.heads // groups)
        query = rows @ part["self_attn.q_proj"][head * size : (head + 1) * size].T
        key = rows @ part["self_attn.k_proj"][group * size : (group + 1) * size].T
        value = rows @ part["self_attn.v_proj"][group * size : (group + 1) * size].T
        if config.kind != "llama":
            query = naive_norm(config, query, part["self_attn.q_norm"])
            key = naive_norm(config, key, part["self_attn.k_norm"])
        scores = naive_turn(query, config.rope_theta) @ naive_turn(key, config.rope_theta).T / math.sqrt(size)
        visible = torch.ones_like(scores).tril().bool()
        outputs.append(scores.masked_fill(~visible, -math.inf).softmax(-1) @ value)
    return torch.cat(outputs, dim=-1) @ part["self_attn.o_proj"].T


def naive_turn(rows: Tensor, theta: float) -> Tensor:
    """Each pair (x_i, x_{i + D/2}) as a complex number, times e^(i position angle)."""
    half = rows.shape[-1] // 2
    angles = torch.tensor([[place * theta ** (-i / half) for i in range(half)] for place in range(len(rows))])
    turned = torch.complex(rows[:, :half], rows[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def test_rotation_depends_on_the_distance_alone() -> None:
    config = SMALL.model_copy(update={"context": 64})
    cosines, sines = rotary_tables(config)
    query, key = (torch.randn(1, 1, 1, 4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    turned = [apply_rotary(heads.expand(1, 64, 1, 4), cosines, sines)[0, :, 0] for heads in (query, key)]
    scores = turned[0] @ turned[1].T
    assert torch.allclose(scores.diagonal(5), scores[0, 5].expand(59), atol=1e-4)
    assert (scores[0, 5] - scores[0, 6]).abs() > 1e-3


def test_normalise_gives_unit_mean_square() -> None:
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * 9
    norm = RMSNorm(64, 1e-5)
    torch.nn.init.ones_(norm.weight)
    assert torch.allclose(norm(rows).square().mean(-1), torch.ones(5), atol=1e-4)


def test_no_position_sees_a_later_one() -> None:
    model, tokens = ready(SMALL), tokens_of(SMALL, 4, batch=1)
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 32
    before, after = model(tokens)[0], model(changed)[0]
    assert torch.equal(before[:7], after[:7])
    assert not torch.allclose(before[7:], after[7:])


def test_load_copies_all_weights() -> None:
    model, flat = build_model(SMALL), initial_weights(SMALL, 5)
    model.load_flat(flat)
    flat.zero_()
    assert torch.equal(model.flat, initial_weights(SMALL, 5))


@pytest.mark.parametrize("changes", SHAPES)
def test_gradient_reaches_every_parameter(changes: dict[str, object]) -> None:
    config = SMALL.model_copy(update=changes)
    model, tokens = ready(config), tokens_of(config, 3, batch=16)
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    assert [name for name, _ in model.named_parameters()] == list(model.shapes.names)
    assert model.flat_gradient is not None
    for name, gradient in model.shapes.views(model.flat_gradient).items():
        assert gradient.abs().sum() > 0, name


def test_gradients_add_up_over_microbatches() -> None:
    tokens = tokens_of(SMALL, 6, batch=4)
    whole, parts = ready(SMALL), ready(SMALL)
    whole(tokens[:, :-1], tokens[:, 1:]).backward()
    for part in torch.split(tokens, 2):
        (parts(part[:, :-1], part[:, 1:]) / 2).backward()
    assert whole.flat_gradient is not None and parts.flat_gradient is not None
    assert torch.allclose(whole.flat_gradient, parts.flat_gradient, atol=1e-6)


@pytest.mark.parametrize("changes", [{}, SHAPES[5], SHAPES[6]], ids=lambda changes: changes.get("kind", "llama"))
def test_learns_a_sequence_by_heart(changes: dict[str, object]) -> None:
    config = SMALL.model_copy(update=changes)
    model, tokens = ready(config), tokens_of(config, 8, batch=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for _ in range(80):
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


def test_autocast_stays_near_full_precision() -> None:
    model, tokens = ready(SMALL), tokens_of(SMALL, 9)
    full = model(tokens[:, :-1], tokens[:, 1:]).item()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(full, abs=0.02)
