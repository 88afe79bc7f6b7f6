"""A port of ours that another program has for a moment: an outgoing connection of its own, or a process that is dying.

It is tried for some seconds more: others know us by it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from protocol.errors import PortTakenError

logger = logging.getLogger(__name__)

PORT_RETRY_SECONDS = 10.0
PORT_RETRY_INTERVAL_SECONDS = 0.25

Claimed = TypeVar("Claimed")


async def retry_while_port_taken(claim: Callable[[], Awaitable[Claimed]]) -> Claimed:
    """What `claim` returns. While it raises PortTakenError it is called again, until PATIENCE seconds have passed."""
    loop = asyncio.get_running_loop()
    until, said = loop.time() + PORT_RETRY_SECONDS, False
    while True:
        try:
            return await claim()
        except PortTakenError as error:
            if loop.time() >= until:
                raise
            if not said:
                logger.warning("%s; it is tried again for %g s", error, PORT_RETRY_SECONDS)
            said = True
        await asyncio.sleep(PORT_RETRY_INTERVAL_SECONDS)
