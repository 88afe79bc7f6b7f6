import math

import pytest

from node.units import format_bytes, format_clock, format_count, format_plural, parse_rate, parse_size
from protocol.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GB", 4_000_000_000), ("512MB", 512_000_000), ("2GiB", 2 << 30), ("1.5 MB", 1_500_000), ("7", 7), ("3k", 3000)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--memory") == size


@pytest.mark.parametrize("text", ["", "GB", "4 apples", "-1GB", "1e9", "0", "0.1", "4GBs", "9" * 40])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="--memory: .*; write it like 4GB"):
        parse_size(text, "--memory")


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("20mbit", 2.5e6),
        ("20 Mbit/s", 2.5e6),
        ("2.5MB", 2.5e6),
        ("2.5 MB/s", 2.5e6),
        ("300kB", 3e5),
        ("256kbit", 32e3),
        ("1gbit", 125e6),
        ("1MiB", 1024.0**2),
        (None, math.inf),
    ],
)
def test_rates_in_bits_and_bytes(text: str | None, rate: float) -> None:
    assert parse_rate(text, "--upload") == rate


@pytest.mark.parametrize(
    "text", ["20mb", "20Mb", "20mbps", "20", "", "fast", "-1MB", "1e6kB", "nanMB", "MB", "\u00b2MB"]
)
def test_a_rate_that_is_unclear_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="^--upload: .* is not a rate; write 20mbit or 2.5MB"):
        parse_rate(text, "--upload")


def test_a_rate_too_low_is_refused() -> None:
    with pytest.raises(UsageError, match="allow at least 256kbit"):
        parse_rate("255kbit", "--download")


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (9100, "9.1k"), (2_500_000, "2.5M"), (3e9, "3.0G")]
)
def test_format_count(number: float, text: str) -> None:
    assert format_count(number) == text


@pytest.mark.parametrize(("number", "text"), [(12, "12 B"), (1500, "1.5 kB"), (4.2e6, "4.2 MB"), (7e12, "7.0 TB")])
def test_format_bytes(number: float, text: str) -> None:
    assert format_bytes(number) == text


def test_format_plural() -> None:
    assert [format_plural(count, "peer") for count in (0, 1, 2)] == ["0 peers", "1 peer", "2 peers"]


def test_clock_has_hours_only_if_needed() -> None:
    assert [format_clock(seconds) for seconds in (None, 0, 59.6, 3661)] == ["-", "0:00", "1:00", "1:01:01"]
