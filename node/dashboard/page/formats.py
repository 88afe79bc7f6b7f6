"""Format numbers for people, as `static/format.js` does in the browser."""

SI_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
ROUNDS_UP_FROM = 0.9995  # of a unit: rounds to 1.00 with three digits
UNKNOWN_TEXT = "-"  # shown for an unknown value
SMALLEST_DECIMAL = 1e-3  # smaller numbers are written with an exponent


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
    """Format with the largest unit and, below ten of it, the next smaller one: `2 d 14 h`, `38 min`."""
    whole = max(0, int(seconds))
    for size, letter, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
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
