"""Amounts as people write them on a command line."""

import re

from protocol.errors import UsageError

SIZE = re.compile(r"^\s*(?P<number>\d{1,9}(\.\d{1,6})?)\s*(?P<unit>B|[kKMGT]B|[KMGT]iB|[kKMGT])?\s*$")
POWERS = {"k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str, option: str) -> int:
    """Bytes of `4GB`, `512MB` (powers of ten), `2GiB` (of two) or a plain number. Raises UsageError."""
    found = SIZE.match(text)
    if not found:
        raise UsageError(f"{option}: {text!r} is no size; write it like 4GB or 512MB")
    unit = found["unit"] or "B"
    size = float(found["number"]) * (1024 if "i" in unit else 1000) ** POWERS.get(unit[0], 0)
    if size < 1:
        raise UsageError(f"{option}: {text!r} is nothing; write it like 4GB or 512MB")
    return int(size)
