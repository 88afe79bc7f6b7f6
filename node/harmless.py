"""What strangers say, be it a model or a peer, must not steer the terminal nor forge a line of the log. PURE."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def sanitize(text: str, allowed: str = "") -> str:
    """One line that can only be read: what is not printable is marked, but for the characters in `kept`."""
    return "".join(sign if sign.isprintable() or sign in allowed else REPLACEMENT for sign in text)
