"""Mutated manifests: each one is valid, or one line of an error that a person can act on."""

import json
import random
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from node.flags import NodeFlags
from node.from_manifest import require_program
from node.model import shape_table
from node.options import parse_node_options
from node.trainer.devices.device import require_usable_device
from protocol.errors import DeviceError, MurmurError
from protocol.identity import Identity
from protocol.manifest.reading import parse_manifest
from protocol.signing import load_signed_manifest, sign_manifest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "configs").glob("*.toml"))
CASES = 200
SECONDS_PER_CASE = 5.0  # of CPU time
ORGANISER = Identity.create()
ODD_VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 7, 2**31, 2**63 - 1, 2**63, 2**64, 10**40),
    *(8, 64, 1000, 1024, 4096, 10_000, 2**16, 2**18, 2**20),
    *(0.0, -0.5, 1e-300, 1e300, float("inf"), float("nan"), 0.3),
    *("", " ", "x" * 3000, "../..", "/", "a\nb", "\u202e", "\x1b[2J", "diloco", "auto", "topk", "12D3KooW"),
    *(True, False, [], [1], ["a", 1], [[1]], {}, {"a": 1}, {"start": 1, "end": 9, "rounds": 2}),
    *(
        [1, 2],
        [{"value": 1, "rounds": 10**9}, 2],
        {"bits": 8, "steps": 10**6},
        {"start": 0, "end": 10**15, "rounds": 9},
    ),
)
MODEL_SIZES = {
    "width": (8, 16, 4096, 2**16),
    "layers": (1, 2, 1024),
    "heads": (1, 2, 4, 1024),
    "kv_heads": (1, 2, 1024),
    "hidden": (8, 9, 2**18),
    "vocabulary": (2, 2**16, 2**20),
    "context": (2, 3, 2**20),
}
Mutation = Callable[[bytes, random.Random], bytes]


def flip_bytes(text: bytes, rng: random.Random) -> bytes:
    changed = bytearray(text)
    for _ in range(rng.choice((1, 1, 2, 5, 40))):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def delete_part(text: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(text))
    return text[:start] + text[start + rng.choice((1, 10, 100)) :]


def delete_line(text: bytes, rng: random.Random) -> bytes:
    lines = text.splitlines(keepends=True)
    del lines[rng.randrange(len(lines))]
    return b"".join(lines)


def repeat_line(text: bytes, rng: random.Random) -> bytes:
    lines = text.splitlines(keepends=True)
    lines.insert(rng.randrange(len(lines)), rng.choice(lines) * rng.choice((1, 2, 50)))
    return b"".join(lines)


def swap_values(text: bytes, rng: random.Random) -> bytes:
    values = tomllib.loads(text.decode())
    first, second = (rng.choice(_keys(values)) for _ in range(2))
    first[0][first[1]], second[0][second[1]] = second[0][second[1]], first[0][first[1]]
    return _to_toml(values)


def replace_value(text: bytes, rng: random.Random) -> bytes:
    values = tomllib.loads(text.decode())
    for _ in range(rng.choice((1, 1, 2))):
        table, key = rng.choice(_keys(values))
        table[key] = rng.choice(ODD_VALUES)
    return _to_toml(values)


def replace_default(text: bytes, rng: random.Random) -> bytes:
    values = parse_manifest(text, "").model_dump(mode="json", exclude_none=True)
    table, key = rng.choice(_keys(values))
    table[key] = rng.choice(ODD_VALUES)
    return _to_toml(values)


def enlarge_model(text: bytes, rng: random.Random) -> bytes:
    values = tomllib.loads(text.decode())
    for key, sizes in MODEL_SIZES.items():
        if rng.random() < 0.7:
            values["model"][key] = rng.choice(sizes)
    values["train"]["batch_tokens"] = values["model"]["context"] * rng.choice((1, 2, 4096))
    return _to_toml(values)


def rename_key(text: bytes, rng: random.Random) -> bytes:
    values = tomllib.loads(text.decode())
    table, key = rng.choice(_keys(values))
    table[rng.choice((key[:-1], key + "s", "", "a.b", "\n", key.upper()))] = table.pop(key)
    return _to_toml(values)


def change_encoding(text: bytes, rng: random.Random) -> bytes:
    return rng.choice(
        (text.decode().encode("utf-16"), b"\xef\xbb\xbf" + text, text.replace(b"\n", b"\r"), text + b"\0")
    )


def break_signature(text: bytes, rng: random.Random) -> bytes:
    signed = sign_manifest(parse_manifest(text, ""), ORGANISER)
    mutate = rng.choice((flip_bytes, delete_part, delete_line, repeat_line))
    return mutate(signed, rng)


MUTATIONS: tuple[Mutation, ...] = (
    flip_bytes, delete_part, delete_line, repeat_line, swap_values, replace_value, replace_value, replace_value,
    replace_default, replace_default, replace_default, enlarge_model, enlarge_model,
    rename_key, change_encoding, break_signature,
)  # fmt: skip


def _keys(values: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Return every key of every table, with the table that holds it."""
    found: list[tuple[dict[str, Any], str]] = []
    for key, value in values.items():
        found.append((values, key))
        if isinstance(value, dict):
            found += _keys(value)
    return found


def _to_toml(values: dict[str, Any]) -> bytes:
    return tomli_w.dumps(values).encode()


def mutate(seed: int) -> tuple[str, bytes]:
    rng = random.Random(seed)
    mutation = rng.choice(MUTATIONS)
    return mutation.__name__, mutation(rng.choice(SOURCES).read_bytes(), rng)


def start(path: Path) -> None:
    """Do everything that `murmur join` does with a manifest before it touches the network."""
    signed = load_signed_manifest(path)
    manifest = signed.manifest
    program = require_program(manifest, signed.text)
    settings = parse_node_options(
        NodeFlags(device="cpu"), manifest=manifest, base=path.parent, folder=path.parent / "node"
    )
    require_usable_device(settings)
    shape_table(manifest.model).hash()
    assert program.plan(0).steps >= 1
    json.dumps(manifest.model_dump(mode="json"))
    assert parse_manifest(manifest.to_toml().encode(), "again").run_id == manifest.run_id


def outcome(path: Path, seed: int) -> str:
    """Return `valid` or the error's line; anything else fails, with the seed."""
    name, text = mutate(seed)
    path.write_bytes(text)
    before = time.process_time()
    try:
        start(path)
        line = "valid"
    except DeviceError as error:  # a model larger than this machine
        line = f"{path}: {error}"
    except MurmurError as error:
        line = str(error)
    except Exception as error:
        raise AssertionError(f"seed {seed}, {name}: {type(error).__name__}: {error}") from error
    took = time.process_time() - before
    assert took < SECONDS_PER_CASE, f"seed {seed}, {name}: {took:.1f} s"
    assert "\n" not in line and len(line) < 1200, f"seed {seed}, {name}: {line!r}"
    assert not any(word in line for word in LEAKS), f"seed {seed}, {name}: {line}"
    assert line == "valid" or str(path) in line, f"seed {seed}, {name}: names no file: {line}"
    return line


LEAKS = ("Input should", "Value error", "should match", "pydantic", "Cannot declare", "namespace", "set_int_max")


def test_mutated_manifests_are_valid_or_one_line(tmp_path: Path) -> None:
    """Control: what reaches the parser is mostly broken, and some of it is not."""
    lines = [outcome(tmp_path / "run.toml", seed) for seed in range(CASES)]
    valid = lines.count("valid")
    assert CASES / 20 < valid < CASES / 2, valid
    assert len(set(lines)) > CASES / 4, "many kinds of faults"


def test_fault_inside_the_program_is_not_taken_for_an_error_of_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the fuzz test fails at the first exception that is no MurmurError."""

    def broken(*_: object) -> None:
        raise KeyError("forgotten")

    monkeypatch.setitem(globals(), "require_program", broken)
    with pytest.raises(AssertionError, match="seed .*KeyError"):
        for seed in range(CASES):
            outcome(tmp_path / "run.toml", seed)
