"""Change valid frames: bytes anywhere, and protobuf messages field by field, so that the result still parses."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

ODD_INTEGERS = (0, 1, 2, 7, 127, 128, 255, 2**15, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)
ODD_FLOATS = (0.0, -0.0, -1.0, 1e-320, 1e300, -1e300, float("inf"), float("-inf"), float("nan"), 2.5, 1e10)
ODD_TEXTS = ("", "x", "contribution", "\x00", "\x1b[2J", "../..", "\u202e", "12D3KooW", "1" * 70, "a" * 5000)
ODD_VALUES: tuple[Any, ...] = (None, True, -1, 0, 2**80, 1e308, [], {}, [[]], {"a": 1}, "0" * 64)
MANY_REPEATS = 1100  # above most limits, and still cheap to make
_EMPTY: dict[int, Any] = {FieldDescriptor.TYPE_BYTES: b"", FieldDescriptor.TYPE_STRING: ""}
_BITS = {
    FieldDescriptor.TYPE_UINT32: 32,
    FieldDescriptor.TYPE_INT32: 31,
    FieldDescriptor.TYPE_UINT64: 64,
    FieldDescriptor.TYPE_INT64: 63,
    FieldDescriptor.TYPE_FIXED32: 32,
    FieldDescriptor.TYPE_FIXED64: 64,
}


def mutate_bytes(raw: bytes, draw: random.Random) -> bytes:
    """Flip, cut, double, move or insert bytes in one to four places."""
    changed = bytearray(raw)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        start = draw.randrange(len(changed) + 1)
        end = min(len(changed), start + draw.choice((1, 2, 4, 16, 200)))
        match draw.randrange(7):
            case 0 if start < len(changed):
                changed[start] ^= 1 << draw.randrange(8)
            case 1 if start < len(changed):
                changed[start] = draw.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                del changed[start:end]
            case 3:
                changed[start:start] = changed[start:end]
            case 4:
                changed[start:start] = b"\xff" * 9 + b"\x01"  # the largest varint
            case 5:
                del changed[start:]
            case 6:
                changed[start:end] = draw.randbytes(end - start)
    return bytes(changed)


def mutate_json(raw: bytes, draw: random.Random) -> bytes:
    """Change one to three values of a JSON document, anywhere in it; it stays compact and sorted as ours are."""
    values = json.loads(raw)
    for _ in range(draw.choice((1, 1, 2, 3))):
        places = list(_places(values))
        if places:
            owner, key = draw.choice(places)
            _mutate_place(owner, key, draw)
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def _places(values: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every table and list with each of its keys."""
    keys = list(values) if isinstance(values, dict) else range(len(values)) if isinstance(values, list) else ()
    for key in keys:
        yield values, key
        yield from _places(values[key])


def _mutate_place(owner: Any, key: Any, draw: random.Random) -> None:
    value = owner[key]
    match draw.randrange(5):
        case 0:
            del owner[key]
        case 1 if isinstance(owner, list):
            owner.extend(copy.deepcopy(value) for _ in range(draw.choice((1, 2, MANY_REPEATS))))
        case 1:
            owner[str(key)[:-1]] = owner.pop(key)
        case 2 if isinstance(value, int):
            owner[key] = draw.choice((value + 1, value - 1, *ODD_INTEGERS))
        case 3 if isinstance(value, str):
            owner[key] = draw.choice((*ODD_TEXTS, value[:-1], value + "0"))
        case _:
            owner[key] = copy.deepcopy(draw.choice((*ODD_VALUES, *ODD_TEXTS)))


def mutate_message(message: Message, draw: random.Random) -> None:
    """Change one to three fields of a message, or of one inside it, in place."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        field: Any = draw.choice(message.DESCRIPTOR.fields)
        if field.is_repeated:
            _mutate_list(getattr(message, field.name), field, draw)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            _mutate_nested(message, field.name, draw)
        elif draw.random() < 0.1:
            message.ClearField(field.name)
        else:
            setattr(message, field.name, _mutate_value(getattr(message, field.name), field, draw))


def _mutate_nested(message: Message, name: str, draw: random.Random) -> None:
    if message.HasField(name) and draw.random() < 0.3:
        message.ClearField(name)
    else:
        getattr(message, name).SetInParent()
        mutate_message(getattr(message, name), draw)


def _mutate_list(values: Any, field: FieldDescriptor, draw: random.Random) -> None:
    place = draw.randrange(len(values)) if len(values) else None
    match draw.randrange(6):
        case 0 if place is not None:
            del values[place]
        case 1 if place is not None:
            _append(values, values[place], draw.choice((1, 1, 2, 20, MANY_REPEATS)))
        case 2 if len(values) > 1:
            kept = list(values)
            draw.shuffle(kept)
            copies = [_copy(value) for value in kept]
            del values[:]
            _append_all(values, copies)
        case 3:
            del values[:]
        case _ if field.type == FieldDescriptor.TYPE_MESSAGE:
            mutate_message(values.add() if place is None else values[place], draw)
        case _ if place is not None:
            values[place] = _mutate_value(values[place], field, draw)
        case _:
            values.append(_mutate_value(_EMPTY.get(field.type, 0), field, draw))


def _append(values: Any, value: Any, count: int) -> None:
    _append_all(values, [_copy(value) for _ in range(count)])


def _append_all(values: Any, more: list[Any]) -> None:
    values.extend(more)


def _copy(value: Any) -> Any:
    if not isinstance(value, Message):
        return value
    copied = type(value)()
    copied.CopyFrom(value)
    return copied


def _mutate_value(value: Any, field: FieldDescriptor, draw: random.Random) -> Any:
    if field.type in _BITS:
        odd = draw.choice((*ODD_INTEGERS, value + 1, max(0, value - 1)))
        return min(odd, 2 ** _BITS[field.type] - 1)
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return draw.choice(ODD_FLOATS)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return not value
    if field.type == FieldDescriptor.TYPE_STRING:
        return draw.choice((*ODD_TEXTS, value[:-1], value + "x", value * 2))
    return draw.choice((b"", bytes(32), value[:-1], value + b"\0", value * 2, mutate_bytes(value, draw), bytes(5000)))
