"""Powers and exponentials with the same last bit on every machine; those of `math` are the C library's affair."""

from decimal import Context, Decimal

CONTEXT = Context(prec=24)


def exp(value: float) -> float:
    """e^value."""
    return float(CONTEXT.exp(Decimal(value)))


def power(base: float, exponent: float) -> float:
    """base^exponent, of a base above zero."""
    return float(CONTEXT.power(Decimal(base), Decimal(exponent)))
