"""Train with little memory: 8-bit moments, and vectors that only rounds use outside of main memory.

Both concern one peer alone. Its contributions have the same form as those of others, so peers with little memory and
others take part in one run.
"""

from optim.errors import UnknownOption
from optim.inner.adamw import AdamW
from optim.inner.eight_bit import EightBitAdamW
from optim.method import Method


def with_small_memory(method: Method) -> Method:
    """Return a method that does the same for the others, with less memory of this peer.

    Raises:
        UnknownOption: its inner optimizer keeps vectors that have no form of 8 bits, or peers exchange them.
    """
    inner = method.inner
    if exchanged := [name for name in method.signal.shared_names if name in inner.vectors]:
        raise UnknownOption(
            f"recipe {method.name} exchanges {exchanged[0]!r} of its inner optimizer, which 8 bits do not hold; "
            'leave memory = "small" out, or choose a recipe that exchanges weights, such as frugal or diloco'
        )
    if isinstance(inner, AdamW):
        return method.with_parts(inner=EightBitAdamW(), has_small_memory=True)
    if not isinstance(inner, EightBitAdamW) and set(inner.vectors) - {*method.signal.consumed_names}:
        raise UnknownOption(
            f"inner optimizer {inner.kind!r} of recipe {method.name} has no form of 8 bits; "
            'leave memory = "small" out, or choose inner = { kind = "adamw" }'
        )
    return method.with_parts(has_small_memory=True)
