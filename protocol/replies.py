"""Answers that do not parse.

gRPC's asyncio client hands them over as None, and so do our own lines. Whoever asks a peer passes the answer through
`parsed` before it looks at it: what a peer sends must not end as a fault of our own code.
"""

from typing import TypeVar

from protocol.errors import MalformedError

Reply = TypeVar("Reply")


def require_reply(reply: Reply | None) -> Reply:
    """MalformedError where what came is no message of its kind."""
    if reply is None:
        raise MalformedError("an answer that does not parse")
    return reply
