"""Replies that do not parse.

gRPC's asyncio client and our own RPC channel return such a reply as None. Callers of a peer pass every reply through
`require_reply` before they use it, so that a peer's invalid bytes do not become an error in our own code.
"""

from typing import TypeVar

from protocol.errors import MalformedError

Reply = TypeVar("Reply")


def require_reply(reply: Reply | None) -> Reply:
    """Raise MalformedError if the reply did not parse."""
    if reply is None:
        raise MalformedError("an answer that does not parse")
    return reply
