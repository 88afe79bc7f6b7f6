"""Two hundred damaged data sets: each is read, or refused with one line; no other error escapes the readers."""

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from node.data import BatchReader, open_corpus, validation_batches
from node.data.check import read_text
from protocol.errors import MurmurError
from protocol.manifest.reading import load_manifest
from protocol.manifest.run import Manifest
from protocol.manifest.sections import DataSection

SEED = 20_261_126
SETS = 200
CONTEXT = 16
TEST_RUN = load_manifest(Path(__file__).parents[3] / "configs" / "test.toml")
SNIPPETS = (
    b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\n", b"\r", b"\r\n", b'"', b"{", b"}", b"[", b"]", b"null", b"\\ud800",
    b"\\u0000", b'{"text": 1}\n', b'{"text": null}\n', b'{"other": "x"}\n', b"[1, 2]\n", b"NaN", b"1e999", b"-1",
    b"99999999999999999999", b"\xef\xbb\xbf", b"[" * 3000, b"x" * 5000, b"../", b"uint32", b"uint16",
)  # fmt: skip


def damage(data: bytes, rng: random.Random) -> bytes:
    """Cut, repeat, overwrite or insert at a few random places."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 40))):
        place = rng.randrange(len(out) + 1)
        match rng.randrange(5):
            case 0:
                del out[place : place + rng.choice((1, 10, len(out)))]
            case 1:
                out[place:place] = rng.choice(SNIPPETS)
            case 2:
                out[place : place + 4] = rng.randbytes(4)
            case 3:
                out[place:place] = out[: rng.randrange(200)]
            case 4:
                out[place : place + 1] = bytes([rng.randrange(256)])
    return bytes(out)


def text_files(folder: Path, rng: random.Random) -> DataSection:
    for index in range(rng.choice((1, 3, 30))):
        (folder / f"{index}.txt").write_text(f"text number {index} with some words é\n" * rng.choice((0, 20, 200)))
    return DataSection(source="text", path="*.txt", validation_share=0.2)


def json_lines(folder: Path, rng: random.Random) -> DataSection:
    ending = rng.choice(("jsonl", "json", "txt"))
    for name in (f"a.{ending}", f"b.{ending}")[: rng.choice((1, 2))]:
        rows = [json.dumps({"text": f"row {row} with some words", "n": row}) for row in range(rng.choice((5, 300)))]
        (folder / name).write_text("\n".join(rows))
    return DataSection(source="hf", path=str(folder), validation_share=0.2)


def parquet(folder: Path, rng: random.Random) -> DataSection:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": [f"row {row} with some words" for row in range(300)], "n": list(range(300))})
    pyarrow.parquet.write_table(table, folder / "a.parquet")
    return DataSection(source="hf", path=str(folder), validation_share=0.2)


def shards(folder: Path, rng: random.Random) -> DataSection:
    entries = []
    for index in range(rng.choice((1, 3))):
        tokens = np.random.default_rng(index).integers(0, 256, 4000).astype("<u2")
        (folder / f"{index:05}.bin").write_bytes(tokens.tobytes())
        entries.append({"name": f"{index:05}.bin", "tokens": len(tokens)})
    header = {"dtype": "uint16", "vocabulary": 256, "tokenizer": "", "shards": entries}
    (folder / "header.json").write_text(json.dumps({"format": "murmur tokens 1", **header}))
    return DataSection(source="tokens", path=str(folder), validation_share=0.2)


MAKERS: tuple[Callable[[Path, random.Random], DataSection], ...] = (text_files, json_lines, parquet, shards)
WEIGHTS = (8, 6, 1, 6)


def damage_folder(folder: Path, rng: random.Random) -> None:
    """Damage the content of one file, seldom replace it by a folder or remove it."""
    file = rng.choice(sorted(folder.iterdir()))
    kind = rng.random()
    if kind < 0.9:
        # A cut in the middle of a token is rare if the size must fit the header: overwrite only, half of the time.
        data = file.read_bytes()
        damaged = damage(data, rng)
        keeps_size = file.suffix == ".bin" and rng.random() < 0.7
        file.write_bytes(damaged[: len(data)].ljust(len(data), b"\xff") if keeps_size else damaged)
        return
    file.unlink()
    if kind > 0.95:
        file.mkdir()


def read(manifest: Manifest, folder: Path) -> str:
    """Read a data set as trainer and check do; return the outcome."""
    try:
        corpus = open_corpus(manifest.data, folder)
        corpus.require_vocabulary(manifest.model.vocabulary)
        validation_batches(corpus, CONTEXT, 1000)
        reader = BatchReader(corpus, CONTEXT, 0, "peer")
        for _ in range(5):
            assert reader.next_batch(4).max() < 256
        return "skipped rows" if corpus.skip_log.take_report() else "read"
    except MurmurError as error:
        assert str(error) and "\n" not in str(error)
        return "refused"


@pytest.mark.slow
def test_damaged_data_sets_are_read_or_refused_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    print("seed", SEED)
    outcomes: Counter[tuple[str, str]] = Counter()
    for number in range(SETS):
        rng = random.Random(SEED + number)
        maker = rng.choices(MAKERS, WEIGHTS)[0]
        folder = tmp_path / f"set-{number}"
        folder.mkdir()
        manifest = TEST_RUN.model_copy(update={"data": maker(folder, rng)})
        damage_folder(folder, rng)
        print("set", number, maker.__name__)
        outcomes[maker.__name__, read(manifest, folder)] += 1
        if manifest.data.source != "hf":
            check(manifest, folder)
    for maker in MAKERS:
        kinds = {outcome for name, outcome in outcomes if name == maker.__name__}
        assert "refused" in kinds and len(kinds) >= 2, f"the damage has no effect: {outcomes}"


def check(manifest: Manifest, folder: Path) -> None:
    try:
        assert read_text(manifest, manifest.data.mixture[0], folder).describe()
    except MurmurError as error:
        assert "\n" not in str(error)
        assert "cannot read the text" not in str(error), "a fault that only the last resort names"
