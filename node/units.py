"""Amounts as people write them on a command line."""

import math
import re

from protocol.errors import UsageError

SIZE = re.compile(r"^\s*(?P<number>\d{1,9}(\.\d{1,6})?)\s*(?P<unit>B|[kKMGT]B|[KMGT]iB|[kKMGT])?\s*$")
POWERS = {"k": 1, "K": 1, "M": 2, "G": 3, "T": 4}
# Bits are spelled out and bytes have a capital B: `20mb` has cost many people a factor of eight.
RATE = re.compile(
    r"^\s*(?P<number>\d{1,9}(\.\d{1,6})?)\s*((?P<bits>[kKmMgG])[bB]it|(?P<bytes>[kKMG]B|[KMG]iB))(/s)?\s*$", re.ASCII
)
MIN_RATE = 32_000.0  # bytes a second: with less, even what peers say about a round comes too late


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


def parse_rate(text: str | None, option: str) -> float:
    """Bytes a second of `20mbit`, `2.5MB` or `1MiB/s`; None: no limit. Raises UsageError."""
    if text is None:
        return math.inf
    found = RATE.match(text)
    if not found:
        raise UsageError(f"{option}: {text[:40]!r} is no rate; write 20mbit or 2.5MB (bits or bytes a second)")
    unit = found["bits"] or found["bytes"]
    base = 1024.0 if "i" in unit else 1000.0
    rate = float(found["number"]) * base ** POWERS[unit[0].upper()] / (8 if found["bits"] else 1)
    if rate < MIN_RATE:
        raise UsageError(f"{option}: {text[:40]!r} is too little to take part with; allow at least 256kbit")
    return rate
