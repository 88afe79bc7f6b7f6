"""Damaged tokenizer files: each works, or is refused in one line."""

import copy
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer

from node.data.tokenizer import FileTokenizer
from protocol.errors import MurmurError
from tests.node.data.odd_tokenizers import ODD

FILES = 200
SEED = 37
TEXT = "the fox \u00e9\u4e16\U0001f426 </s> \x00 <s>a b\n"
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 3, 2**31, 2**32 - 1, 2**40, 1.5, "", "x", "<s>", "\ud800", [], {}, [1]),
    {"type": "ByteLevel"},
    {"type": "Sequence"},
)
Place = tuple[str | int, ...]


def places(values: Any, at: Place = ()) -> Iterator[Place]:
    """All places below `values`, but only some of the many words of a vocabulary."""
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in list(items)[:20]:
        yield (*at, key)
        yield from places(value, (*at, key))


def inside(values: Any, place: Place) -> Any:
    for key in place:
        values = values[key]
    return values


def change_structure(values: Any, random: Random) -> str:
    """Remove, replace, copy or add one value."""
    changed = copy.deepcopy(values)
    everywhere = list(places(changed))
    place = random.choice(everywhere)
    holder, key = inside(changed, place[:-1]), place[-1]
    match random.randrange(4):
        case 0:
            del holder[key]
        case 1:
            holder[key] = random.choice(VALUES)
        case 2:
            holder[key] = copy.deepcopy(inside(changed, random.choice(everywhere)))
        case _ if isinstance(holder, dict):
            holder[random.choice(("type", "dropout", "continuing_subword_prefix", "extra"))] = random.choice(VALUES)
        case _:
            holder.insert(0, random.choice(VALUES))
    return json.dumps(changed)


def flip_bytes(text: str, random: Random) -> bytes:
    data = bytearray(text.encode())
    for _ in range(random.randrange(1, 4)):
        data[random.randrange(len(data))] = random.randrange(256)
    return bytes(data)


def damaged_files(seed: int) -> Iterator[bytes]:
    random, whole = Random(seed), list(ODD.values())
    for _ in range(FILES):
        values = random.choice(whole)
        is_flipped = random.random() < 0.3
        yield flip_bytes(json.dumps(values), random) if is_flipped else change_structure(values, random).encode()


def use(path: Path) -> None:
    tokenizer = FileTokenizer(path)
    ids = tokenizer.encode(TEXT).tolist()
    assert set(ids) <= set(tokenizer.ids.tolist()) and tokenizer.size == tokenizer.ids.max() + 1
    assert isinstance("".join(tokenizer.decode(iter([*ids, *tokenizer.ids.tolist()[:60]]))), str)
    assert all(token.id < tokenizer.size for token in tokenizer.special_tokens.values())
    Tokenizer.from_str(tokenizer.to_json())


def test_a_damaged_tokenizer_file_works_or_is_refused_in_one_line(tmp_path: Path) -> None:
    path, outcomes = tmp_path / "tokenizer.json", Counter[str]()
    print("seed", SEED)
    for number, data in enumerate(damaged_files(SEED)):
        path.write_bytes(data)
        try:
            use(path)
        except MurmurError as error:
            assert str(error).isprintable() and str(path) in str(error), number
            outcomes[type(error).__name__] += 1
        else:
            outcomes["works"] += 1
    print(dict(outcomes))
    assert outcomes["works"] > FILES / 10 and outcomes["DataError"] > FILES / 4
