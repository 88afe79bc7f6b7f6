"""Batches with a cache against one text at a time without, and against transformers' own `generate`."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from node.model import LanguageModel, build_model, initial_weights
from node.model.cache import KeyValueCache
from node.model.export import export
from node.model.families import FAMILIES
from node.model.generate import READ_AT_ONCE, Completion, Sampling, cache_bytes, complete, sample_batch
from protocol.manifest.model import ModelSection
from tests.node.model.test_export import MODELS, manifest, node_folder

torch.set_num_threads(1)
SIZES = {"vocabulary": 256, "width": 32, "layers": 2, "heads": 4, "hidden": 48, "context": 64}
PROMPTS = [[7, 8, 9, 10], [200], [3] * 17, [1, 2, 3, 4, 5, 6]]
USABLE = torch.arange(256)
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def peaky(config: ModelSection) -> LanguageModel:
    """Build a model whose likeliest tokens are far from a tie."""
    model = build_model(config)
    model.load_flat(torch.randn(model.flat.numel(), generator=torch.Generator().manual_seed(3)) / 4)
    return model


def greedy(model: LanguageModel, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    return [each.tokens for each in complete(model, prompts, tokens, Sampling(0.0), USABLE)]


@every_model
def test_temperature_zero_equals_generate_of_transformers(tmp_path: Path, model: dict[str, object]) -> None:
    run = manifest({**SIZES, **model})
    ours = build_model(run.model)
    ours.load_flat(node_folder(tmp_path / "node", run))
    export(tmp_path / "node", tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = [
        theirs.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
        for prompt in PROMPTS
    ]
    assert greedy(ours, PROMPTS, 24) == [
        row[0, len(prompt) :].tolist() for row, prompt in zip(expected, PROMPTS, strict=True)
    ]


def test_every_family_that_builds_a_model_has_a_cache() -> None:
    compared = {str(model.get("kind", "llama")) for model in MODELS.values()}
    assert compared | {"custom"} == set(FAMILIES)
    for model in MODELS.values():
        built = build_model(ModelSection.model_validate({**SIZES, **model}))
        assert built.new_cache(torch.zeros(1, dtype=torch.int64), 4) is not None


class WithoutCache:
    """Lets a model read the whole window for each token."""

    def __init__(self, patch: pytest.MonkeyPatch, model: LanguageModel) -> None:
        patch.setattr(model, "new_cache", lambda *_: None)


@pytest.mark.parametrize(
    ("kind", "document_end"), [("llama", None), *((kind, 11) for kind in FAMILIES if kind != "custom")]
)
def test_batch_writes_the_texts_that_each_prompt_has_alone(
    monkeypatch: pytest.MonkeyPatch, kind: str, document_end: int | None
) -> None:
    """Across the end of the window, with documents and without, drawn and greedy."""
    experts = {"experts": 4, "experts_per_token": 2} if kind == "qwen3-moe" else {}
    values = {**SIZES, **experts, "kind": kind, "kv_heads": 2, "context": 12, "document_end": document_end}
    model = peaky(ModelSection.model_validate(values))
    prompts = [*PROMPTS[:3], [5, 11, 6, 7]]
    keys = [9, 8, 7, 6]
    for sampling in (Sampling(0.0), Sampling(0.9, top_k=5, top_p=0.9)):
        together = complete(model, prompts, 18, sampling, USABLE, keys=keys)
        with monkeypatch.context() as patch:
            WithoutCache(patch, model)
            alone = [
                complete(model, [prompt], 18, sampling, USABLE, keys=[key])[0]
                for prompt, key in zip(prompts, keys, strict=True)
            ]
        assert [each.tokens for each in together] == [each.tokens for each in alone]
        for one, other in zip(together, alone, strict=True):
            assert one.log_probabilities == pytest.approx(other.log_probabilities, abs=1e-3)


def test_texts_end_before_a_stop_and_the_others_go_on() -> None:
    model = peaky(ModelSection.model_validate(SIZES))
    whole = greedy(model, PROMPTS, 30)
    stops = frozenset({whole[1][4], whole[2][9]})
    found = complete(model, PROMPTS, 30, Sampling(0.0), USABLE, stops)
    for text, completion in zip(whole, found, strict=True):
        places = [place for place, token in enumerate(text) if token in stops]
        assert completion.tokens == text[: places[0] if places else None]
        assert completion.stopped == bool(places)
    kept = complete(model, PROMPTS, 30, Sampling(0.0), USABLE, stops, keeps_stops=True)
    for without, completion in zip(found, kept, strict=True):
        assert len(completion.tokens) == len(without.tokens) + without.stopped
        assert completion.tokens[: len(without.tokens)] == without.tokens and completion.stopped == without.stopped
    assert len({len(completion.tokens) for completion in found}) > 1


def test_prompt_that_is_longer_than_a_pass_is_read_in_pieces() -> None:
    model = peaky(ModelSection.model_validate({**SIZES, "context": 2 * READ_AT_ONCE}))
    prompt = torch.randint(256, (READ_AT_ONCE + 100,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        expected = int(model(torch.tensor([prompt]))[0, -1].argmax())
    assert greedy(model, [prompt, [1]], 1)[0] == greedy(model, [prompt], 1)[0] == [expected]


def test_prompts_beyond_the_memory_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    model = peaky(ModelSection.model_validate(SIZES))
    expected, taken = greedy(model, PROMPTS, 8), list[int]()
    new_cache = model.new_cache

    def note(padding: torch.Tensor, length: int) -> KeyValueCache | None:
        taken.append(len(padding))
        return new_cache(padding, length)

    monkeypatch.setattr(model, "new_cache", note)
    monkeypatch.setattr("node.model.generate.CACHE_MEMORY", 2 * cache_bytes(model.config, 1, 17 + 8))
    assert greedy(model, PROMPTS, 8) == expected
    assert taken == [2, 2]


def test_cache_takes_the_bytes_that_are_said() -> None:
    config = ModelSection.model_validate({**SIZES, "kv_heads": 2})
    model = peaky(config)
    cache = model.new_cache(torch.zeros(3, dtype=torch.int64), 10)
    assert cache is not None
    model.next_logits(torch.ones(3, 4, dtype=torch.int64), cache)
    assert sum(memory.nbytes for memory in (*cache._keys, *cache._values)) == cache_bytes(config, 3, 10)
    with pytest.raises(ValueError, match="do not fit"):
        model.next_logits(torch.ones(3, 7, dtype=torch.int64), cache)


def test_two_texts_that_take_turns_do_not_disturb_each_other() -> None:
    model = peaky(ModelSection.model_validate(SIZES))
    one, two = ([prompt] for prompt in PROMPTS[:2])
    first = sample_batch(model, one, 20, Sampling(0.0), USABLE)
    second = sample_batch(model, two, 20, Sampling(0.0), USABLE)
    turns = [(next(first)[0].token, next(second)[0].token) for _ in range(20)]
    assert [list(tokens) for tokens in zip(*turns, strict=True)] == [
        greedy(model, one, 20)[0],
        greedy(model, two, 20)[0],
    ]


def test_gradients_and_the_loss_do_not_meet_the_cache() -> None:
    config = ModelSection.model_validate(SIZES)
    model, fresh = build_model(config), build_model(config)
    for each in (model, fresh):
        each.load_flat(initial_weights(config, 0))
    completions: list[Completion] = complete(model, PROMPTS, 5, Sampling(), USABLE)
    assert all(len(each.tokens) == 5 for each in completions)
    tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(tokens[:, :-1], tokens[:, 1:]), fresh(tokens[:, :-1], tokens[:, 1:]))
