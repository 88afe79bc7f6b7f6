"""Mutated files of models: a run opens with them, or one line says what is wrong; never a traceback."""

import copy
import json
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import murmuration
from node.model.weight_files import start_weights
from node.run_file import load_run_file
from protocol.errors import MurmurError
from tests.node.model.pretrained_folders import KINDS, save_model, write_manifest

pytestmark = pytest.mark.slow

CASES = 500
SECONDS_PER_CASE = 5.0  # of CPU time
INDEX = "model.safetensors.index.json"
ODD_VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 2, 2**16, 2**20, 2**31, 2**63, 10**40, 0.5, -0.0, 1e308),
    *("", "x" * 3000, "../..", "/", "a\nb", "\x1b[2J", "llama3", "F32", "F8_E4M3", "normal 0.1"),
    *(True, False, None, [], [1], [[2]], ["full_attention"], {}, {"a": 1}, {"rope_type": "yarn", "factor": 4}),
)
Files = dict[str, bytes]


def flip_bytes(text: bytes, rng: random.Random) -> bytes:
    changed = bytearray(text)
    for _ in range(rng.choice((1, 1, 2, 5, 40))):
        changed[rng.randrange(min(len(changed), rng.choice((16, 200, 10**9))))] = rng.randrange(256)
    return bytes(changed)


def cut(text: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(text))
    return text[:start] + rng.choice((b"", text[start + rng.choice((1, 10, 100)) :]))


def _tables(values: Any) -> list[Any]:
    inner = values.values() if isinstance(values, dict) else values if isinstance(values, list) else ()
    return [table for value in inner for table in _tables(value)] + ([values] if inner else [])


def change_values(text: bytes, rng: random.Random) -> bytes:
    values = json.loads(text)
    for _ in range(rng.choice((1, 1, 2, 4))):
        table = rng.choice(_tables(values))
        key = rng.choice(list(table) if isinstance(table, dict) else range(len(table)))
        if isinstance(table, dict) and rng.random() < 0.3:
            table[rng.choice((f"{key}s", "", "quantization_config", "__metadata__"))] = table.pop(key)
        else:
            table[key] = copy.deepcopy(rng.choice(ODD_VALUES))
        if not _tables(values):
            break
    return json.dumps(values).encode()


def nest(text: bytes, rng: random.Random) -> bytes:
    return rng.choice((b"[", b'{"a":')) * rng.choice((10, 1000, 200_000))


def grow(text: bytes, rng: random.Random) -> bytes:
    return text + b" " * rng.choice((1, 2**20, 2**21))


def change_header(text: bytes, rng: random.Random) -> bytes:
    """Change the JSON of a safetensors file, or the length before it."""
    length = struct.unpack("<Q", text[:8])[0]
    header, elements = text[8 : 8 + length], text[8 + length :]
    if rng.random() < 0.2:
        return struct.pack("<Q", rng.choice((0, 1, length - 1, length + 1, 2**40, 2**64 - 1))) + header + elements
    changed = rng.choice((change_values, change_values, flip_bytes, cut))(header, rng)
    return struct.pack("<Q", len(changed)) + changed + elements


JSON_MUTATIONS = (change_values, change_values, change_values, flip_bytes, cut, nest, grow)
WEIGHT_MUTATIONS = (change_header, change_header, flip_bytes, cut)


def mutation_of(name: str, rng: random.Random) -> Callable[[bytes, random.Random], bytes]:
    return rng.choice(JSON_MUTATIONS if name.endswith(".json") else WEIGHT_MUTATIONS)


def write_run(folder: Path, lines: tuple[str, ...]) -> Path:
    path = write_manifest(folder, *lines)
    if 'kind = "custom"' in lines:
        path.write_text(path.read_text().replace('"text"', '"own"'))
    return path


def outcome(folder: Path, files: Files, lines: tuple[str, ...], seed: int) -> str:
    """Return `valid` or the error's line; anything else fails, with the seed."""
    rng = random.Random(seed)
    name = rng.choice([name for name in files for _ in range(1 if name.endswith(".safetensors") else 4)])
    mutate = mutation_of(name, rng)
    (folder / name).write_bytes(mutate(files[name], rng))
    before = time.process_time()
    try:
        manifest = load_run_file(write_run(folder.parent, lines)).manifest
        weights = start_weights(manifest, folder.parent)
        assert weights is not None and bool(weights.isfinite().all())
        line = "valid"
    except MurmurError as error:
        line = str(error)
    except Exception as error:
        raise AssertionError(f"seed {seed}, {name}, {mutate.__name__}: {type(error).__name__}: {error}") from error
    finally:
        (folder / name).write_bytes(files[name])
    took = time.process_time() - before
    where = f"seed {seed}, {name}, {mutate.__name__}"
    assert took < SECONDS_PER_CASE, f"{where}: {took:.1f} s"
    assert line.isprintable() and len(line) < 1500, f"{where}: {line!r}"
    return line


@pytest.mark.parametrize("kind", [*KINDS, "custom"])
def test_mutated_files_of_a_model_are_valid_or_one_line(tmp_path: Path, kind: str) -> None:
    """Control: some files still open, and the others fail in many ways."""
    folder = tmp_path / "weights"
    lines: tuple[str, ...] = ('from = "weights"',)
    folder.mkdir()
    if kind == "custom":
        module = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Linear(4, 3))
        murmuration.describe(module, folder / "net.json")
        murmuration.describe(module, folder / "model.safetensors")
        lines = ('kind = "custom"', 'tensors = "weights/net.json"', 'from = "weights"')
    else:
        save_model(folder, kind, shard="20KB", num_hidden_layers=1)
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "generation_config.json"}
    cases = CASES // (len(KINDS) + 1)
    found = [outcome(folder, files, lines, seed) for seed in range(cases)]
    assert cases / 50 < found.count("valid") < cases / 2, found.count("valid")
    assert len(set(found)) > cases / 6, "many kinds of faults"
