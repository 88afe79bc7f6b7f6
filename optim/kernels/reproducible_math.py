"""Powers and exponentials with the same last bit on every machine; those of `math` depend on the C library."""

from decimal import Context, Decimal

CONTEXT = Context(prec=24)


def exp(value: float) -> float:
    return float(CONTEXT.exp(Decimal(value)))


def power(base: float, exponent: float) -> float:
    """Return base^exponent for a base above zero."""
    return float(CONTEXT.power(Decimal(base), Decimal(exponent)))
