"""Measure how well each source of text mixes documents, and what the order does to the validation loss.

    python benchmarks/mixing.py [--steps 1500] [--json]

The text is 200 documents of 5.5 kB from Python's standard library and one of 2 MB with random numbers. One small model
trains on it by itself, from the sources `text` and `hf`, and as a control in the order of the text. The table shows the
documents in a batch, the share of neighbouring sequences that continue one another, and the validation loss on the way.
Takes two minutes. The exit code is 1 if neighbours continue one another in `hf`, or if its last loss is 0.1 above that
of `text`.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from node.data import BatchReader, Corpus, open_corpus, validation_batches
from node.data.corpus import TokenArray
from node.data.text_files import find_stdlib_files
from node.model import build_model, initial_weights
from node.trainer.inner_step import InnerOptimizer, accumulate_gradient, validation_loss
from optim.inner.adamw import AdamW
from protocol.manifest.reading import load_manifest
from protocol.manifest.run import Manifest
from protocol.manifest.sections import DataSection

DOCUMENTS, DOCUMENT_BYTES, LONG_BYTES = 200, 5500, 2_000_000
SEQUENCES = 32
LOOKS = 6
VALIDATION_TOKENS = 32_768
MAX_CONTINUING, MAX_GAP = 0.01, 0.1
FOUND_BYTES = 24  # of a window, to find where it is from


@dataclass(frozen=True)
class Report:
    """One order of the text."""

    source: str
    documents: float  # in a batch, on average
    continuing: float  # share of neighbouring sequences of a batch
    losses: list[float]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    torch.set_num_threads(1)
    texts = make_texts()
    with tempfile.TemporaryDirectory() as folder:
        reports = list(measure(texts, Path(folder), words.steps))
    print(json.dumps([asdict(report) for report in reports]) if words.json else table(reports))
    by_source = {report.source: report for report in reports}
    gap = by_source["hf"].losses[-1] - by_source["text"].losses[-1]
    return int(by_source["hf"].continuing > MAX_CONTINUING or gap > MAX_GAP)


def make_texts() -> list[str]:
    source = "".join(path.read_text("utf-8") for path in find_stdlib_files()[0][:200]).encode()
    short = [
        source[start : start + DOCUMENT_BYTES].decode(errors="replace")
        for start in range(0, DOCUMENTS * DOCUMENT_BYTES, DOCUMENT_BYTES)
    ]
    draw = random.Random(0)
    lines = (f"{draw.randrange(10**6)},{draw.random():.6f}\n" for _ in range(LONG_BYTES // 8))
    return [*short[: DOCUMENTS // 2], "".join(lines)[:LONG_BYTES], *short[DOCUMENTS // 2 :]]


def measure(texts: Sequence[str], folder: Path, steps: int) -> Iterator[Report]:
    manifest = load_manifest(Path(__file__).parents[1] / "configs" / "test.toml")
    for name, config in write_sources(texts, folder):
        corpus, context = open_corpus(config, folder), manifest.model.context
        reader = BatchReader(corpus, context, 0, "peer")
        yield report_of(name, texts, manifest, corpus, lambda reader=reader: reader.next_batch(SEQUENCES), steps)  # type: ignore[misc]
        if name == "text":
            yield report_of("in order", texts, manifest, corpus, batches_in_order(corpus, context), steps)


def write_sources(texts: Sequence[str], folder: Path) -> Iterator[tuple[str, DataSection]]:
    (folder / "set").mkdir()
    (folder / "set" / "train.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    for index, text in enumerate(texts):
        (folder / f"{index:03}.txt").write_text(text)
    yield "text", DataSection(source="text", path="*.txt", validation_share=0.1)
    yield "hf", DataSection(source="hf", path="set", validation_share=0.1)


def batches_in_order(corpus: Corpus, context: int) -> Callable[[], Tensor]:
    """Return a reader of consecutive windows."""
    tokens, starts = corpus.sources[0].training, iter(range(0, 10**12, context))
    assert isinstance(tokens, TokenArray)

    def next_batch() -> Tensor:
        places = [next(starts) % (len(tokens) - context - 1) for _ in range(SEQUENCES)]
        return torch.from_numpy(np.stack([tokens.read(place, context + 1) for place in places]))

    return next_batch


def report_of(
    name: str, texts: Sequence[str], manifest: Manifest, corpus: Corpus, next_batch: Callable[[], Tensor], steps: int
) -> Report:
    joined = "".join(texts).encode()
    ends = np.cumsum([len(text.encode()) for text in texts])
    held_out = validation_batches(corpus, manifest.model.context, VALIDATION_TOKENS)
    model = build_model(manifest.model)
    model.load_flat(initial_weights(manifest.model, 0))
    optimizer = InnerOptimizer(model, manifest.train, AdamW())
    documents, continuing, losses = list[int](), list[float](), list[float]()
    for step in range(steps):
        batch = next_batch()
        if step < 50:
            places = [joined.find(bytes(row[:FOUND_BYTES].to(torch.uint8).tolist())) for row in batch]
            documents.append(len(set(np.searchsorted(ends, places, side="right").tolist())))
            continuing.append(float((np.diff(places) == manifest.model.context).mean()))
        accumulate_gradient(model, batch, SEQUENCES)
        optimizer.step(step)
        optimizer.clear_gradient()
        if (step + 1) % (steps // LOOKS) == 0:
            losses.append(validation_loss(model, model.flat.clone(), held_out)[0])
    return Report(name, float(np.mean(documents)), float(np.mean(continuing)), losses)


def table(reports: Sequence[Report]) -> str:
    head = "| source | documents in a batch of 32 | neighbours that continue | validation loss |\n|---|---|---|---|"
    rows = [
        f"| {report.source} | {report.documents:.1f} | {report.continuing:.1%} | "
        + ", ".join(f"{loss:.2f}" for loss in report.losses)
        + " |"
        for report in reports
    ]
    return "\n".join([head, *rows])


if __name__ == "__main__":
    sys.exit(main())
