"""`murmur eval` on a run, on one checkpoint and on an export; the tasks of lm-eval where the package is installed."""

import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from node.commands.eval.command import EvalOptions, evaluate, print_results
from node.commands.eval.results import read_results
from node.commands.eval.scoring import Scorer
from node.dashboard.run_report import RunReport, write_report
from node.data import open_corpus, validation_batches
from node.data.batches import VALIDATION_TOKENS
from node.data.tokenizer import ByteTokenizer
from node.model import build_model, shape_table
from node.model.export import export
from node.model.generate import Sampling, sample_tokens, usable_tokens
from node.model.opened_model import OpenedModel
from node.trainer.inner_step import validation_loss
from protocol.errors import DataError, MissingFileError, UsageError
from protocol.manifest.sections import DataSection, SourceSection
from tests.node.model.test_export import manifest, node_folder

torch.set_num_threads(1)
TASKS = Path(__file__).parents[4] / "examples" / "tasks"
HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(not HAS_HARNESS, reason="lm-eval is not installed")
SHAPES = shape_table(manifest().model)
WEIGHTS = torch.randn(SHAPES.numel, generator=torch.Generator().manual_seed(3)) / 4  # as node_folder draws them
TEXT = "".join(f"def bird_{number}():\n    return {number * number}\n" for number in range(400))


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """Return the folder of a node with a checkpoint, beside its text."""
    run = manifest()
    data = run.data.model_copy(update={"source": "text", "path": "text.txt", "validation_share": 0.1})
    folder = tmp_path / "node"
    node_folder(folder, run.model_copy(update={"data": data}))
    (folder / "text.txt").write_text(TEXT)
    return folder


def test_loss_is_the_one_that_nodes_measure_and_is_noted(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, results = manifest(), evaluate(EvalOptions(source=str(node)))
    data = run.data.model_copy(update={"source": "text", "path": "text.txt", "validation_share": 0.1})
    batches = validation_batches(open_corpus(data, node), 16, VALIDATION_TOKENS)
    expected, _ = validation_loss(build_model(run.model), WEIGHTS, batches)
    values = {result.metric: result.value for result in results}
    assert math.isclose(values["loss"], expected, rel_tol=1e-5)
    assert math.isclose(values["perplexity"], math.exp(expected), rel_tol=1e-4)
    assert math.isclose(values["bits_per_byte"], expected / math.log(2), rel_tol=1e-5), "a token is a byte"
    assert read_results(node) == tuple(results) and {result.round for result in results} == {5}
    print_results(results, as_json=True)
    assert json.loads(capsys.readouterr().out)["results"][0]["metric"] == "loss"
    print_results(results, as_json=False)
    assert f"{values['loss']:.4f}" in capsys.readouterr().out


def test_mixture_is_measured_by_source_and_as_a_whole(tmp_path: Path) -> None:
    sources = tuple(
        SourceSection(name=name, source="text", path=f"{name}.txt", weight=weight)
        for name, weight in (("birds", 3.0), ("numbers", 1.0))
    )
    data = DataSection(sources=sources, validation_share=0.1)
    node_folder(tmp_path, manifest().model_copy(update={"data": data}))
    (tmp_path / "birds.txt").write_text(TEXT)
    (tmp_path / "numbers.txt").write_text("0123456789" * 400)
    results = evaluate(EvalOptions(source=str(tmp_path)))
    found = {(result.task, result.metric): result.value for result in results}
    assert {task for task, _ in found} == {"validation", "validation.birds", "validation.numbers"}
    parts = [found[f"validation.{source.name}", "loss"] for source in sources]
    assert math.isclose(found["validation", "loss"], 0.75 * parts[0] + 0.25 * parts[1], rel_tol=1e-6)
    assert abs(parts[0] - parts[1]) > 1e-3, "the negative control"


def test_checkpoint_and_export_have_the_same_loss(node: Path, tmp_path: Path) -> None:
    of_node, of_checkpoint = (
        evaluate(EvalOptions(source=str(source), limit=20))
        for source in (node, next((node / "checkpoints").glob("*.round-5")))
    )
    export(node, tmp_path / "export")
    of_export = evaluate(EvalOptions(source=str(tmp_path / "export"), data=node / "run.toml", limit=20))
    for mine, theirs in ((of_checkpoint, of_node), (of_export, of_node)):
        for one, other in zip(mine, theirs, strict=True):
            assert math.isclose(one.value, other.value, rel_tol=1e-3 if one.metric == "bits_per_byte" else 1e-6)
    assert len(read_results(node)) == 6 and not read_results(tmp_path / "export")
    with pytest.raises(UsageError, match="--data, or --tasks"):
        evaluate(EvalOptions(source=str(tmp_path / "export")))


def test_report_of_a_finished_run_gets_the_results(node: Path) -> None:
    write_report(
        node, RunReport(run="test", run_id="0" * 64, recipe="diloco", parameters=1, tokens=2, rounds=3, seconds=4)
    )
    results = evaluate(EvalOptions(source=str(node), limit=4))
    report = RunReport.model_validate_json((node / "report.json").read_bytes())
    assert report.evaluations == tuple(results) and f"{results[0].value:.4f}" in (node / "report.md").read_text()


def test_missing_text_is_named(node: Path) -> None:
    (node / "text.txt").unlink()
    with pytest.raises(MissingFileError, match=r"text\.txt"):
        evaluate(EvalOptions(source=str(node)))


@pytest.mark.skipif(HAS_HARNESS, reason="lm-eval is installed")
def test_missing_package_is_named(node: Path) -> None:
    with pytest.raises(DataError, match=r"pip install 'murmuration\[eval\]'"):
        evaluate(EvalOptions(source=str(node), tasks=[str(TASKS)]))


@needs_harness
def test_local_task_is_evaluated(node: Path) -> None:
    results = evaluate(EvalOptions(source=str(node), tasks=[str(TASKS / "python_words.yaml")], limit=8))
    values = {result.metric: result for result in results}
    assert set(values) == {"acc", "acc_norm"} and values["acc"].samples == 8 and values["acc"].standard_error
    assert values["acc"].value == expected_accuracy(8)
    assert read_results(node) == tuple(results)
    assert [result.value for result in evaluate(EvalOptions(source=str(node), tasks=[str(TASKS)], limit=8))] == [
        result.value for result in results
    ]


@needs_harness
def test_fault_of_a_task_is_one_line(node: Path, tmp_path: Path) -> None:
    task = (TASKS / "python_words.yaml").read_text()
    (tmp_path / "gone.yaml").write_text(task.replace("python_words.jsonl", "gone.jsonl"))
    with pytest.raises(DataError, match="cannot be loaded"):
        evaluate(EvalOptions(source=str(node), tasks=[str(tmp_path / "gone.yaml")]))
    (tmp_path / "python_words.jsonl").write_bytes((TASKS / "python_words.jsonl").read_bytes())
    (tmp_path / "bad.yaml").write_text(task.replace("{{text}}", "{{text | odd}}"))
    with pytest.raises(DataError, match="cannot be"):
        evaluate(EvalOptions(source=str(node), tasks=[str(tmp_path / "bad.yaml")]))


@needs_harness
def test_requests_are_answered() -> None:
    """A whole text is the sum of its windows, and a generated text ends before the first stop text."""
    from lm_eval.utils import make_disjoint_window

    from node.commands.eval.harness import HarnessModel

    opened = OpenedModel(manifest().model, WEIGHTS, ByteTokenizer(), None)
    model = HarnessModel(opened, Scorer(opened.build(), 2))
    text = "def bird(): return 1, 2, 3 if many else None"
    found = model.loglikelihood_rolling([SimpleNamespace(args=(text,)), SimpleNamespace(args=("x",))])
    tokens, expected = list(text.encode()), 0.0
    for start in range(0, len(tokens), 16):
        context = tokens[max(0, start - 16) : start] or list(b"\n")
        piece = tokens[start : start + 16]
        before, chosen = make_disjoint_window(((context + piece)[-17:-1], piece))
        expected += slow_score(before, chosen)
    assert math.isclose(found[0], expected, rel_tol=1e-4) and math.isclose(
        found[1], slow_score([10], [120]), rel_tol=1e-4
    )
    whole = "".join(generate_greedily(opened, "def", 12))
    request = SimpleNamespace(args=("def", {"until": [whole[5:7]], "max_gen_toks": 12}))
    assert model.generate_until([request]) == [whole[: whole.index(whole[5:7])]]
    assert model.generate_until([SimpleNamespace(args=("def", {"until": [], "max_gen_toks": 12}))]) == [whole]


def generate_greedily(opened: OpenedModel, prompt: str, count: int) -> Iterator[str]:
    usable, start = usable_tokens(opened), list(prompt.encode())
    tokens = sample_tokens(opened.build(), start, count, Sampling(0.0), usable)
    return opened.tokenizer.decode(tokens, after=start)


def slow_score(context: list[int], chosen: list[int]) -> float:
    """Return the log probability of a continuation, computed alone."""
    model, row = build_model(manifest().model), torch.tensor((context + chosen)[-17:])
    model.load_flat(WEIGHTS)
    logits = model(row[None, :-1])[0].detach().log_softmax(-1)
    return sum(float(logits[place - 1, row[place]]) for place in range(len(row) - len(chosen), len(row)))


def expected_accuracy(count: int) -> float:
    """Return the share of examples whose right choice has the highest probability."""
    right = 0
    for line in (TASKS / "python_words.jsonl").read_text().splitlines()[:count]:
        example = json.loads(line)
        context = example["text"].rstrip()  # lm-eval moves blanks from the end of a context to the continuation
        blanks = example["text"][len(context) :]
        scores = [slow_score(list(context.encode()), list((blanks + each).encode())) for each in example["choices"]]
        right += scores.index(max(scores)) == example["answer"]
    return right / count
