"""Read amounts and addresses from a command line, and format them for people."""

import ipaddress
import math
import re
from typing import Final

from protocol.errors import MalformedError, UsageError
from protocol.signing import peer_id_of

ADDRESS = re.compile(r"^(?:(?P<host>[A-Za-z0-9.\-]*|\[[0-9A-Fa-f:.]+\]):)?(?P<port>\d{1,5})$")
ALL_INTERFACES = ("0.0.0.0", "::")
MULTIADDRESS = re.compile(r"^/(ip4|ip6|dns|dns4|dns6|dnsaddr)/[^/\s]{1,253}(/[^/\s]{1,64})*\Z")
PORTS = re.compile(r"/(?:tcp|udp)/([^/]{0,6})")
IpKind = type[ipaddress.IPv4Address | ipaddress.IPv6Address]
IP_KINDS: Final[dict[str, IpKind]] = {"ip4": ipaddress.IPv4Address, "ip6": ipaddress.IPv6Address}
SIZE = re.compile(r"^\s*(?P<number>\d{1,9}(\.\d{1,6})?)\s*(?P<unit>B|[kKMGT]B|[KMGT]iB|[kKMGT])?\s*$")
POWERS = {"k": 1, "K": 1, "M": 2, "G": 3, "T": 4}
# Bits are spelled out and bytes have a capital B: `20mb` has cost many people a factor of eight.
RATE = re.compile(
    r"^\s*(?P<number>\d{1,9}(\.\d{1,6})?)\s*((?P<bits>[kKmMgG])[bB]it|(?P<bytes>[kKMG]B|[KMG]iB))(/s)?\s*$", re.ASCII
)
MIN_RATE = 32_000.0  # bytes per second; below this, even the messages of a round arrive too late
SI_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
DURATION_UNITS = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
ROUNDS_UP_FROM = 0.9995  # of a unit: rounds to 1.00 with three digits
UNKNOWN_TEXT = "-"  # shown for an unknown value
SMALLEST_DECIMAL = 1e-3  # smaller numbers are written with an exponent

COUNT_FACTORS = {letter: 1000 ** POWERS[letter] for letter in "kMGT"} | {"B": 1000**3}  # B: a billion


def parse_size(text: str, option: str) -> int:
    """Return the bytes of `4GB`, `512MB` (powers of ten), `2GiB` (of two) or a plain number. Raises UsageError."""
    found = SIZE.match(text)
    if not found:
        raise UsageError(f"{option}: {text!r} is not a size; write it like 4GB or 512MB")
    unit = found["unit"] or "B"
    size = float(found["number"]) * (1024 if "i" in unit else 1000) ** POWERS.get(unit[0], 0)
    if size < 1:
        raise UsageError(f"{option}: {text!r} is less than one byte; write it like 4GB or 512MB")
    return int(size)


def parse_count(text: str, option: str) -> int:
    """Return the number of `100M`, `2.5G` or `300000`. Raises UsageError."""
    number, factor = (text[:-1], COUNT_FACTORS[text[-1]]) if text[-1:] in COUNT_FACTORS else (text, 1)
    try:
        count = int(float(number) * factor)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{option}: {text[:40]!r} is not a number; write it like 100M or 2G") from error
    if count < 1:
        raise UsageError(f"{option}: {text[:40]!r} is too few; write it like 100M or 2G")
    return count


def parse_rate(text: str | None, option: str) -> float:
    """Return the bytes per second of `20mbit`, `2.5MB` or `1MiB/s`; None means no limit. Raises UsageError."""
    if text is None:
        return math.inf
    found = RATE.match(text)
    if not found:
        raise UsageError(f"{option}: {text[:40]!r} is not a rate; write 20mbit or 2.5MB (bits or bytes per second)")
    unit = found["bits"] or found["bytes"]
    base = 1024.0 if "i" in unit else 1000.0
    rate = float(found["number"]) * base ** POWERS[unit[0].upper()] / (8 if found["bits"] else 1)
    if rate < MIN_RATE:
        raise UsageError(f"{option}: {text[:40]!r} is too slow to take part; allow at least 256kbit")
    return rate


def multiaddress_fault(address: str) -> str | None:
    """Return what is wrong with a multiaddress that a user typed; `None` if nothing is."""
    if not MULTIADDRESS.match(address):
        return "is not a multiaddress; write it like /ip4/203.0.113.7/tcp/4001/p2p/12D3..."
    _, kind, host, *_ = address.split("/")
    if kind in IP_KINDS and not _is_ip_address(host, IP_KINDS[kind]):
        return f"has no address of {kind} behind /{kind}/; correct it"
    if any(not port.isascii() or not port.isdigit() or int(port) > 65535 for port in PORTS.findall(address)):
        return "has no port behind /tcp/ or /udp/; use 0 to 65535"
    if "/p2p/" in address:
        try:
            peer_id_of(address)
        except MalformedError:
            return "does not end in a peer id; append the one that `murmur key` prints there"
    return None


def _is_ip_address(host: str, kind: IpKind) -> bool:
    try:
        kind(host)
    except ValueError:
        return False
    return True


def parse_host_port(address: str, option: str) -> tuple[str, int]:
    """Split `HOST:PORT`, `:PORT` or `PORT` (on loopback if no host is named). Raises UsageError."""
    found = ADDRESS.match(address)
    if not found or int(found["port"]) > 65535:
        raise UsageError(f"{option}: {address!r} is not an address; write it like 127.0.0.1:8080 or 0.0.0.0:8080")
    return (found["host"] or "127.0.0.1").strip("[]"), int(found["port"])


def format_count(number: float) -> str:
    """Shorten a number: 9100 becomes 9.1k."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"


def format_bytes(number: float) -> str:
    """Write bytes in powers of ten, as links are measured: 4200000 becomes 4.2 MB."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(number) >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} B"


def format_plural(count: int, noun: str) -> str:
    """Write a count with its noun: 1 peer, 2 peers."""
    return f"{count} {noun}{'s' * (count != 1)}"


def format_clock(seconds: float | None) -> str:
    """Format seconds: 75 gives `1:15`, an unknown time `-`."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_si(value: float) -> str:
    """Format with three digits and an SI prefix: 1840000 gives `1.84 M`."""
    for size, letter in SI_UNITS:
        if value >= ROUNDS_UP_FROM * size:
            return f"{value / size:.3g} {letter}" if value < 1e15 else f"{value / size:.0f} {letter}"
    return f"{value:.3g}"


def choose_unit(largest: float) -> tuple[float, str]:
    """Return the size and letter of the unit for numbers up to `largest`; never below a thousand."""
    return next(((size, letter) for size, letter in SI_UNITS if largest >= size), SI_UNITS[-1])


def format_number(value: float | None, digits: int) -> str:
    return UNKNOWN_TEXT if value is None else f"{value:,.{digits}f}"


def format_duration(seconds: float) -> str:
    """Format with the largest unit and, below ten of it, the next smaller one: `2 d 14 h`, `38 min`, `3.4 s`, `120 ms`.

    `duration` in `static/format.js` writes the same.
    """
    if 0 < seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f}".removesuffix(".0") + " s"
    whole = round(seconds)
    for size, letter, below, small in DURATION_UNITS:
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size} {letter}" + (f" {rest} {small}" if rest and whole < 10 * size else "")
    return f"{whole} s"


def format_short(value: float | None) -> str:
    """Format with three digits, small numbers with an exponent: 0.002, 3.5e-4."""
    if value is None:
        return UNKNOWN_TEXT
    if value == 0 or abs(value) >= SMALLEST_DECIMAL:
        return f"{value:.3g}" if abs(value) < 1000 else format_si(value)
    digits, _, exponent = f"{value:.2e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"


def format_share(value: float | None) -> str:
    return UNKNOWN_TEXT if value is None else f"{100 * value:.1f}%"
