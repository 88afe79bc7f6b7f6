"""An adapter trains as in PEFT, changes nothing else, and its export loads in PEFT and transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from node.daemon.checkpoints.trained_weights import TrainedWeights
from node.data.tokenizer import ByteTokenizer
from node.from_manifest import build_program
from node.model import LanguageModel, build_model, initial_weights, shape_table
from node.model.adapter import AdaptedLinear, compress, expand, frozen_bytes
from node.model.export import merge_adapter, write_export
from node.model.memory_estimate import PROCESS_BYTES, fixed_bytes, microbatch_bytes
from node.model.weight_files import read_frozen, require_frozen, start_weights
from node.run_file import load_run_file
from node.trainer.inner_step import InnerOptimizer, accumulate_gradient, validation_loss
from optim.inner.base import WEIGHTS
from protocol.errors import CheckpointError, MissingFileError, MurmurError, UsageError
from protocol.manifest.run import Manifest
from protocol.manifest.sections import ADAPTED, AdapterSection
from tests.node.model.pretrained_folders import KINDS, save_model, write_manifest

torch.set_num_threads(1)
ALL: dict[str, Any] = {"rank": 4, "alpha": 8.0, "base": "fp32"}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def adapter_of(kind: str, **changes: Any) -> dict[str, Any]:
    return ALL | ({"targets": ATTENTION} if kind == "qwen3_moe" else {}) | changes


def manifest_of(folder: Path, kind: str = "qwen3", dtype: torch.dtype = torch.float32, **changes: Any) -> Manifest:
    """A run that adapts a random model in `folder`/base."""
    save_model(folder / "base", kind, dtype)
    table = "\n".join(f"{key} = {json.dumps(value)}" for key, value in adapter_of(kind, **changes).items())
    path = write_manifest(folder, 'from = "base"')
    path.write_text(path.read_text() + f"[adapter]\n{table}\n")
    return load_run_file(path).manifest


def model_of(manifest: Manifest, folder: Path) -> LanguageModel:
    return build_model(manifest.model, frozen=read_frozen(manifest.model, folder))


def random_factors(manifest: Manifest) -> Tensor:
    return torch.randn(shape_table(manifest.model).numel, generator=torch.Generator().manual_seed(5)) / 4


def windows_of(manifest: Manifest, count: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(manifest.model.vocabulary, (count, manifest.model.context + 1), generator=generator)


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_begins_as_it_is_in_every_family(tmp_path: Path, kind: str) -> None:
    manifest = manifest_of(tmp_path, kind)
    weights = start_weights(manifest, tmp_path)
    assert weights is not None
    model, tokens = model_of(manifest, tmp_path), windows_of(manifest)[:, :-1]
    model.load_flat(weights)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
        model.load_flat(random_factors(manifest))
        assert not torch.allclose(model(tokens), theirs(tokens).logits, atol=1e-2), "the control"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("merged", [False, True])
def test_export_has_the_same_logits_in_peft_and_transformers(tmp_path: Path, kind: str, merged: bool) -> None:
    peft = pytest.importorskip("peft")
    manifest, out = manifest_of(tmp_path, kind), tmp_path / "out"
    trained = TrainedWeights(manifest, 3, random_factors(manifest))
    write_export(merge_adapter(trained, tmp_path) if merged else trained, ByteTokenizer(), out)
    if merged:
        theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    else:
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
        theirs = peft.PeftModel.from_pretrained(base, out)
        assert "adapter (LoRA, rank 4)" in (out / "README.md").read_text()
    model, tokens = model_of(manifest, tmp_path), windows_of(manifest)[:, :-1]
    model.load_flat(trained.anchor)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-4, atol=2e-4)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_training_equals_peft_and_torch(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    manifest = manifest_of(tmp_path)
    weights = start_weights(manifest, tmp_path)
    assert weights is not None
    model = model_of(manifest, tmp_path)
    model.load_flat(weights)
    train = manifest.train.model_copy(update={"learning_rate": 1e-2, "clip": 1.0})
    ours = InnerOptimizer(model, train, build_program(manifest).method.inner)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(ADAPTED), task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(base, config)
    named = dict(theirs.named_parameters())
    for name, view in shape_table(manifest.model).views(weights).items():
        named[f"base_model.model.{name.replace('.weight', '.default.weight')}"].data.copy_(view)
    trained = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in trained) == weights.numel()
    adam = torch.optim.AdamW(
        trained, lr=train.learning_rate, betas=(train.beta1, train.beta2), weight_decay=train.weight_decay
    )
    frozen = {name: each.clone() for name, each in theirs.named_parameters() if not each.requires_grad}
    losses = []
    for step in range(12):
        windows = windows_of(manifest, 8).roll(step, 0)[:4]
        loss = accumulate_gradient(model, windows, 2)
        ours.step(step)
        ours.clear_gradient()
        logits = theirs(windows[:, :-1]).logits
        other = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        other.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, train.clip)
        adam.step()
        adam.zero_grad()
        losses.append((loss, float(other.detach())))
    for mine, other_loss in losses:
        assert mine == pytest.approx(other_loss, abs=1e-4)
    assert losses[-1][0] < losses[0][0] - 0.05, "it learns"
    assert all(torch.equal(value, dict(theirs.named_parameters())[name]) for name, value in frozen.items())


@pytest.mark.parametrize(("kind", "most"), [("bf16", 0.004), ("int8", 0.008), ("nf4", 0.12)])
def test_fewer_bits_hold_the_matrix_nearly(kind: Any, most: float) -> None:
    matrix = torch.randn(24, 200, generator=torch.Generator().manual_seed(0)) / 8
    held = compress(matrix, kind)
    found = expand(held, torch.float32)
    assert found.shape == matrix.shape
    error = float((found - matrix).norm() / matrix.norm())
    assert most / 10 < error < most
    assert torch.equal(expand(compress(torch.zeros(3, 5), kind), torch.float32), torch.zeros(3, 5))
    used = sum(each.numel() * each.element_size() for each in held)
    assert used == frozen_bytes([("layer.q_proj.weight", (24, 200))], kind)


def test_four_bits_are_those_of_bitsandbytes() -> None:
    levels = torch.tensor([-1.0, 0.0, 1.0, 0.0795803, 0.44, -0.7, 0.2, -0.05])
    row = torch.zeros(1, 64)
    row[0, :8] = 3 * levels
    found = expand(compress(row, "nf4"), torch.float32)[0, :8] / 3
    expected = torch.tensor([-1.0, 0.0, 1.0, 0.0795803, 0.44070983, -0.6961928, 0.2461123, -0.09105])
    expected[6] = 0.1609302 if abs(0.2 - 0.1609302) < abs(0.2 - 0.2461123) else 0.2461123
    expected[7] = -0.09105 if abs(-0.05 + 0.09105) < 0.05 else 0.0
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("base", ["bf16", "int8", "nf4"])
def test_gradients_flow_through_narrow_weights(tmp_path: Path, base: str) -> None:
    manifest = manifest_of(tmp_path, base=base)
    model = model_of(manifest, tmp_path)
    model.load_flat(random_factors(manifest))
    assert all(isinstance(each, AdaptedLinear) for name, each in model.named_modules() if name.endswith("_proj"))
    windows = windows_of(manifest)
    tokens = windows[:, :-1]
    with torch.no_grad():
        torch.testing.assert_close(model.next_logits(tokens), model(tokens)[:, -1], rtol=1e-4, atol=1e-4)
    accumulate_gradient(model, windows, 4)
    gradient = model.attach_gradient().clone()
    direction = torch.randn(gradient.numel(), generator=torch.Generator().manual_seed(2))
    step, flat = 1e-3, model.flat.clone()
    up, down = (validation_loss(model, flat + sign * step * direction, [windows])[0] for sign in (1, -1))
    assert (up - down) / (2 * step) == pytest.approx(float(gradient @ direction), rel=0.02, abs=1e-3)


def test_the_trained_vector_is_the_adapter_alone(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, targets=["v_proj", "q_proj"])
    names = shape_table(manifest.model).names
    assert names[:2] == (
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.0.self_attn.q_proj.lora_B.weight",
    )
    assert len(names) == 8 and len(shape_table(manifest.model).layout.block_spans) == 2
    program = build_program(manifest)
    assert program.numel == shape_table(manifest.model).numel == initial_weights(manifest.model, 0).numel()
    assert WEIGHTS in program.method.signal.shared_names


def test_missing_or_other_weights_are_one_line(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path)
    require_frozen(manifest.model, tmp_path)
    faults: list[tuple[Manifest, type[MurmurError], str]] = [
        (manifest.published(), UsageError, "--base-model"),
        (manifest.with_base_model("nowhere"), MissingFileError, "nowhere"),
    ]
    for run, kind, text in faults:
        with pytest.raises(kind, match=text) as caught:
            read_frozen(run.model, tmp_path)
        assert "\n" not in str(caught.value)
    save_model(tmp_path / "other", "qwen3", torch.float16)
    with pytest.raises(CheckpointError, match="other weights than those that this run's adapter changes"):
        read_frozen(manifest.with_base_model("other").model, tmp_path)


def test_the_run_id_covers_the_adapter_and_no_other_run_changes(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path)
    other = manifest_of(tmp_path, rank=8)
    assert manifest.run_id != other.run_id
    assert manifest.published().run_id == manifest.run_id == manifest.with_whole_path(tmp_path).run_id
    assert manifest.with_whole_path(tmp_path).model.from_ == str(tmp_path / "base")
    again = Manifest.model_validate_json(manifest.model_dump_json())
    assert again == manifest and again.model.adapter == AdapterSection(**ALL)
    plain = manifest.model_copy(update={"adapter": None})
    assert b"adapter" not in plain.canonical()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"adapter": {"rank": 0}}, "rank"),
        ({"adapter": {"targets": ["q_proj", "q_proj"]}}, "once"),
        ({"adapter": {"targets": ["lm_head"]}}, "targets"),
        ({"pipeline": {"stages": 2, "microbatch": 1}}, "adapter needs pipeline.stages = 1"),
        ({"weights": ()}, "adapter needs the weights"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, change: dict[str, Any], fault: str) -> None:
    values = manifest_of(tmp_path).model_dump(mode="json")
    if "weights" in change:
        values["model"] |= {"weights": [], "from": ""}
    else:
        table = next(iter(change))
        values[table] |= change[table]
    with pytest.raises(ValueError, match=fault):
        Manifest.model_validate_json(json.dumps(values))


def test_experts_have_adapters_of_attention_alone(tmp_path: Path) -> None:
    with pytest.raises(MurmurError, match="adapter.targets.*with experts"):
        manifest_of(tmp_path, "qwen3_moe", targets=["q_proj", "gate_proj"])


QWEN_05B = {
    "kind": "qwen3",
    "vocabulary": 151_936,
    "width": 896,
    "layers": 24,
    "heads": 14,
    "kv_heads": 2,
    "hidden": 4864,
}
LLAMA_8B = {"vocabulary": 128_256, "width": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "hidden": 14_336}


def large(sizes: dict[str, Any], context: int, base: str, tied: bool, targets: list[str] | None = None) -> Manifest:
    layers = sizes["layers"]
    return Manifest.model_validate(
        {
            "run": {"name": "large"},
            "model": {**sizes, "context": context, "tied": tied, "weights": ("0" * 64,) * (layers + 2)},
            "adapter": {"rank": 16, "base": base, "targets": tuple(targets or ADAPTED)},
            "data": {"source": "python-stdlib"},
            "train": {"batch_tokens": context, "learning_rate": 1e-4, "microbatch": 1, "memory": "small"},
            "method": {"recipe": "frugal"},
        }
    )


def test_memory_of_large_models_is_what_volunteers_have() -> None:
    small = large(QWEN_05B, 512, "bf16", tied=True)
    needed = fixed_bytes(small, "cpu") + microbatch_bytes(small, 1, "cpu", recompute="full")
    assert 1.5e9 < needed < 4e9
    big = large(LLAMA_8B, 512, "nf4", tied=False, targets=ATTENTION)
    needed = fixed_bytes(big, "cuda") + microbatch_bytes(big, 1, "cuda", recompute="full")
    assert 6e9 < needed < 8e9
    whole = replace_adapter(big)
    assert fixed_bytes(whole, "cuda") > 100e9, "the control: all weights"
    assert fixed_bytes(small, "cpu") > PROCESS_BYTES


def replace_adapter(manifest: Manifest) -> Manifest:
    return manifest.model_copy(update={"adapter": None, "model": manifest.model.with_adapter(None)})
