"""What strangers say, be it a model or a peer, must not steer the terminal nor forge a line of the log. PURE."""

REPLACED = "\N{REPLACEMENT CHARACTER}"


def harmless(text: str, kept: str = "") -> str:
    """One line that can only be read: what is not printable is marked, but for the characters in `kept`."""
    return "".join(sign if sign.isprintable() or sign in kept else REPLACED for sign in text)
