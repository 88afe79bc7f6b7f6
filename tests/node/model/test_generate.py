"""Generation: sampling rules, the sliding window, and text that arrives in whole characters."""

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from node.daemon.checkpoints.checkpoint import Checkpoint, SavedChain, save
from node.data.tokenizer import ByteTokenizer, FileTokenizer
from node.model import LanguageModel, build_model, initial_weights, shape_table
from node.model.cache import KeyValueCache
from node.model.decoders.decoder import Decoder
from node.model.decoders.family import LlamaFamily
from node.model.generate import Sampling, draw, generate, sample_tokens
from optim.rollouts import gumbel_noise
from protocol.errors import CheckpointError, DataError, MissingFileError, UsageError
from protocol.manifest.run import Manifest
from tests.node.data.odd_tokenizers import ODD, odd_tokenizer

torch.set_num_threads(1)


def manifest(tokenizer: str = "", vocabulary: int = 256) -> Manifest:
    sizes = {"width": 16, "layers": 1, "heads": 2, "hidden": 16, "context": 8}
    return Manifest.model_validate(
        {
            "run": {"name": "test"},
            "model": {"vocabulary": vocabulary, **sizes},
            "data": {"source": "python-stdlib", "tokenizer": tokenizer},
            "train": {"batch_tokens": 8, "learning_rate": 0.1},
            "method": {"recipe": "diloco"},
        }
    )


def node_folder(folder: Path, run: Manifest) -> Path:
    shapes, weights = shape_table(run.model), initial_weights(run.model, 0)
    (folder / "run.toml").write_text(run.to_toml())
    checkpoint = Checkpoint(run.run_id, shapes.hash(), 1, bytes(32), SavedChain({}, b""), weights, {}, {}, {})
    save(folder / "checkpoints", checkpoint, shapes, keep=1)
    return folder


class Successor(Decoder):
    """Always sure that the next token is the one after the last; notes how much it was shown."""

    def __init__(self) -> None:
        super().__init__(LlamaFamily(), LlamaFamily().layer, manifest().model)
        self.shown: list[int] = []

    def next_logits(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        self.shown.append(tokens.shape[1])
        return torch.nn.functional.one_hot((tokens[:, -1] + 1) % 256, 256).float() * 100


def take(model: LanguageModel, prompt: Sequence[int], count: int, temperature: float, usable: int = 256) -> list[int]:
    return list(sample_tokens(model, prompt, count, Sampling(temperature), torch.arange(usable)))


def test_sampling_reads_each_token_once_until_the_window_is_full() -> None:
    model = Successor()
    assert take(model, [5, 6], 10, 1.0) == list(range(7, 17))
    assert model.shown == [2, 1, 1, 1, 1, 1, 1, 4, 1, 1], "of nine tokens the newest half of the context is read again"


def test_a_long_prompt_is_cut_to_its_end() -> None:
    model = Successor()
    assert take(model, range(100), 1, 0.0) == [100]
    assert model.shown == [8]


def test_tokens_beyond_the_vocabulary_are_never_taken() -> None:
    assert take(Successor(), [99], 1, 0.0, usable=50)[0] < 50


def drawn(logits: Tensor, sampling: Sampling, count: int = 4000) -> Counter[int]:
    """Draw at `count` positions of one text."""
    rows, keys = logits.expand(count, -1), torch.full((count,), 7)
    noise = gumbel_noise(keys, torch.arange(count), torch.arange(len(logits)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("node.model.generate.gumbel_noise", lambda *_: noise)
        places, _ = draw(rows, sampling, keys, 0, torch.arange(len(logits)))
    return Counter(places.tolist())


def test_temperature_zero_takes_the_likeliest() -> None:
    assert set(drawn(torch.tensor([0.0, 0.1, 0.05]), Sampling(0))) == {1}


def test_frequencies_follow_temperature_top_k_and_top_p() -> None:
    logits = torch.tensor([0.1, 0.2, 0.7]).log()
    whole = drawn(logits, Sampling(1.0))
    assert [whole[token] / 4000 for token in range(3)] == pytest.approx([0.1, 0.2, 0.7], abs=0.03)
    hot = drawn(logits, Sampling(100.0))
    assert [hot[token] / 4000 for token in range(3)] == pytest.approx([1 / 3] * 3, abs=0.04)
    for few in (drawn(logits, Sampling(1.0, top_k=2)), drawn(logits, Sampling(1.0, top_p=0.8))):
        assert few[0] == 0 and few[1] / 4000 == pytest.approx(2 / 9, abs=0.03)
    assert set(drawn(logits, Sampling(1.0, top_p=0.7))) == {2}, "the smallest set of that probability"
    assert len(drawn(logits, Sampling(1.0, top_k=99))) == 3


def test_log_probabilities_are_those_of_the_temperature() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.7], [0.7, 0.2, 0.1]]).log()
    keys, ids = torch.tensor([1, 2]), torch.arange(3)
    places, found = draw(logits, Sampling(2.0, top_k=2), keys, 5, ids)
    expected = torch.log_softmax(logits / 2.0, dim=-1).gather(1, places[:, None])[:, 0]
    assert found == pytest.approx(expected.tolist(), abs=1e-6)


def test_characters_arrive_whole() -> None:
    pieces = list(ByteTokenizer().decode(iter("aé🐦b".encode())))
    assert "".join(pieces) == "aé🐦b"
    assert [piece for piece in pieces if piece] == ["a", "é", "🐦", "b"]


def test_bytes_that_are_no_text_are_marked() -> None:
    assert "".join(ByteTokenizer().decode(iter([0xFF, 0x41, 0xF0, 0x9F]))) == "\ufffdA\ufffd"


def test_generates_from_a_node_folder_reproducibly(tmp_path: Path) -> None:
    folder = node_folder(tmp_path, manifest())
    first, second, other = ("".join(generate(folder, "def", 40, 1.0, None, seed)) for seed in (1, 1, 2))
    assert first == second != other
    assert 10 <= len(first) <= 40


def test_an_empty_prompt_is_a_line_break(tmp_path: Path) -> None:
    folder = node_folder(tmp_path, manifest())
    assert list(generate(folder, "", 20)) == list(generate(folder, "\n", 20))


def test_a_byte_model_with_a_larger_vocabulary_writes_bytes_alone(tmp_path: Path) -> None:
    folder = node_folder(tmp_path, manifest(vocabulary=1000))
    assert "".join(generate(folder, "x", 30, 5.0))


def test_a_run_with_its_own_tokenizer(tmp_path: Path) -> None:
    own = Tokenizer(models.WordLevel({"bird": 0, "sky": 1, "?": 2}, unk_token="?"))
    own.pre_tokenizer, own.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    folder = node_folder(tmp_path, manifest(tokenizer="words.json", vocabulary=8))
    with pytest.raises(MissingFileError, match=r"no tokenizer file .*words\.json; put"):
        generate(folder, "bird")
    (folder / "words.json").write_text("{}")
    with pytest.raises(DataError, match=r"words\.json is not a tokenizer\.json \(.*\); name one"):
        generate(folder, "bird")
    own.save(str(folder / "words.json"))
    text = "".join(generate(folder, "bird", 30))
    assert set(text.split()) <= {"bird", "sky", "?"} and len(text.split()) == 30


@pytest.mark.parametrize("name", ODD)
def test_only_tokens_are_sampled_whatever_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "odd.json").write_text(odd_tokenizer(name))
    tokenizer, sampled = FileTokenizer(tmp_path / "odd.json"), set[int]()
    run = manifest(tokenizer="odd.json", vocabulary=tokenizer.size + 200)

    def note(*arguments: Any) -> Iterator[int]:
        for token in sample_tokens(*arguments[:-1]):  # without the end of a document, which would end the text
            sampled.add(token)
            yield token

    monkeypatch.setattr("node.model.generate.sample_tokens", note)
    assert "".join(generate(node_folder(tmp_path, run), "the", 100, 50.0))
    assert len(sampled) > 1 and sampled <= set(tokenizer.ids.tolist())
    everything = torch.arange(run.model.vocabulary)
    free = set(sample_tokens(build_model(run.model), [0], 100, Sampling(50.0), everything))
    assert not free <= set(tokenizer.ids.tolist()), "the control: the model itself takes others"


@pytest.mark.parametrize("name", ["padding", "template", "truncation"])
def test_continuation_depends_on_the_whole_prompt(tmp_path: Path, name: str) -> None:
    """Padding gave every prompt the same continuation, and truncation all of those with the same beginning."""
    (tmp_path / "odd.json").write_text(odd_tokenizer(name))
    folder = node_folder(tmp_path, manifest(tokenizer="odd.json", vocabulary=258))
    first, second = ("".join(generate(folder, prompt, 20, 0)) for prompt in ("abcabc", "abcxyz"))
    assert first != second


def test_a_model_that_diverged_is_named(tmp_path: Path) -> None:
    run = manifest()
    shapes = shape_table(run.model)
    folder = node_folder(tmp_path, run)
    weights = torch.full((shapes.numel,), math.nan)
    save(
        folder / "checkpoints",
        Checkpoint(run.run_id, shapes.hash(), 2, bytes(32), SavedChain({}, b""), weights, {}, {}, {}),
        shapes,
        1,
    )
    with pytest.raises(CheckpointError, match="output is not finite: its training diverged"):
        list(generate(folder, "x"))


def test_a_prompt_of_no_token_is_refused(tmp_path: Path) -> None:
    own = Tokenizer(models.WordLevel({"bird": 0, "sky": 1}))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = node_folder(tmp_path, manifest(tokenizer="words.json", vocabulary=8))
    own.save(str(folder / "words.json"))
    for prompt in ("", " "):
        with pytest.raises(UsageError, match="turns this prompt into no tokens; use another"):
            generate(folder, prompt)


def test_the_package_of_tokenizers_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "words.json").write_text("{}")
    with pytest.raises(DataError, match=r"needs the package tokenizers; .* pip install 'murmuration\[data\]'"):
        generate(node_folder(tmp_path, manifest(tokenizer="words.json")), "bird")


def test_a_prompt_outside_the_model_is_refused(tmp_path: Path) -> None:
    folder = node_folder(tmp_path, manifest(vocabulary=100))
    with pytest.raises(UsageError, match="use another prompt"):
        generate(folder, "z")


@pytest.mark.parametrize("options", [{"tokens": 0}, {"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}])
def test_options_out_of_range_are_refused_at_the_call(tmp_path: Path, options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=r"at least|at most"):
        generate(tmp_path, "x", **options)


def test_nothing_to_generate_from(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        generate(tmp_path / "absent", "x")
    with pytest.raises(CheckpointError):
        generate(tmp_path, "x")
    (tmp_path / "run.toml").write_text(manifest().to_toml())
    with pytest.raises(CheckpointError):
        generate(tmp_path, "x")


def test_what_a_model_says_does_not_steer_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers trained it. Its line breaks and tabs are its own."""
    said = "fine\n\t\x1b[2J\r\u202eok"
    monkeypatch.setattr("node.model.generate.sample_tokens", lambda *_: iter(said.encode()))
    assert "".join(generate(node_folder(tmp_path, manifest()), "x")) == "fine\n\t\ufffd[2J\ufffd\ufffdok"
    assert not said.replace("\n", "").replace("\t", "").isprintable(), "the control: it would"
