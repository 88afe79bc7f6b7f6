"""A batch has windows of many documents, from every source of text."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from node.data import BatchReader, open_corpus
from node.data.corpus import TokenArray, TokenIds
from node.data.text_files import find_stdlib_files
from protocol.manifest.sections import DataSection
from tests.node.data.data_sets import write_rows

CONTEXT = 32
SEQUENCES = 32
WINDOWS_PER_DOCUMENT = 50
DOCUMENTS = 80
LONG_DOCUMENT = 20 * WINDOWS_PER_DOCUMENT * CONTEXT


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))


def texts() -> list[str]:
    """Return documents, one of them long, none with a part that occurs twice."""
    rng = np.random.default_rng(0)
    sizes = [WINDOWS_PER_DOCUMENT * CONTEXT] * (DOCUMENTS - 1) + [LONG_DOCUMENT]
    return [bytes(rng.integers(97, 123, size, dtype=np.uint8)).decode() for size in sizes]


def text_source(folder: Path) -> tuple[DataSection, list[str]]:
    for index, text in enumerate(texts()):
        (folder / f"{index:02}.txt").write_text(text)
    return DataSection(source="text", path="*.txt"), texts()


def shards_source(folder: Path) -> tuple[DataSection, list[str]]:
    shards = folder / "shards"
    shards.mkdir()
    data = np.frombuffer("".join(texts()).encode(), dtype=np.uint8).astype("<u2")
    (shards / "00000.bin").write_bytes(data.tobytes())
    entry = f'{{"name": "00000.bin", "tokens": {len(data)}}}'
    (shards / "header.json").write_text(
        f'{{"dtype": "uint16", "vocabulary": 256, "tokenizer": "", "shards": [{entry}]}}'
    )
    return DataSection(source="tokens", path="shards"), texts()


def stdlib_source(folder: Path) -> tuple[DataSection, list[str]]:
    return DataSection(source="python-stdlib"), [path.read_text("utf-8") for path in find_stdlib_files()[0]]


def hf_source(folder: Path) -> tuple[DataSection, list[str]]:
    write_rows(folder / "set/train.jsonl", ({"text": text} for text in texts()))
    return DataSection(source="hf", path="set"), texts()


def hf_library_source(folder: Path) -> tuple[DataSection, list[str]]:
    """Return the same set in a format that the library reads."""
    import pyarrow
    import pyarrow.parquet

    (folder / "set").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts()}), folder / "set/train.parquet")
    return DataSection(source="hf", path="set"), texts()


def find_places(windows: TokenIds, documents: list[str]) -> list[int]:
    """Return where each window begins in the text of all documents; a window of several is found by its first part."""
    joined = "".join(documents).encode()
    return [joined.find(bytes(window.astype(np.uint8))[: CONTEXT // 2]) for window in windows]


def count_documents(windows: TokenIds, documents: list[str]) -> int:
    ends = np.cumsum([len(text.encode()) for text in documents])
    return len(set(np.searchsorted(ends, find_places(windows, documents), side="right").tolist()))


def continuing_share(windows: TokenIds, documents: list[str]) -> float:
    """Return the share of neighbours that continue one another."""
    return float((np.diff(find_places(windows, documents)) == CONTEXT).mean())


@pytest.mark.parametrize("make", [text_source, shards_source, stdlib_source, hf_source, hf_library_source])
def test_a_batch_has_windows_of_many_documents(
    tmp_path: Path, make: Callable[[Path], tuple[DataSection, list[str]]]
) -> None:
    config, documents = make(tmp_path)
    reader = BatchReader(open_corpus(config, tmp_path), CONTEXT, 0, "a")
    for _ in range(3):
        batch = reader.next_batch(SEQUENCES).numpy()
        assert count_documents(batch, documents) >= SEQUENCES / 2
        assert continuing_share(batch, documents) < 0.1


def test_a_reader_without_shuffling_has_few_documents_in_a_batch() -> None:
    """The negative control: windows in the order of the text."""
    tokens = TokenArray([np.frombuffer("".join(texts()).encode(), dtype=np.uint8)])
    for batch in range(3):
        first = batch * SEQUENCES * CONTEXT
        starts = range(first, first + SEQUENCES * CONTEXT, CONTEXT)
        windows = np.stack([tokens.read(start, CONTEXT + 1) for start in starts])
        assert count_documents(windows, texts()) <= 2
        assert continuing_share(windows, texts()) > 0.9
