"""Host name lookups in threads of their own.

A lookup cannot be cancelled: if a name server does not answer, its thread stays for half a minute. Other peers choose
the names, so these threads must not serve anything else, and there are only a few of them.
"""

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from protocol.errors import UnreachableError

MAX_LOOKUPS = 2
MAX_QUEUED_LOOKUPS = 64  # all connections to a peer, and some to others

Lookup = Callable[..., Sequence[Any]]  # like socket.getaddrinfo


class Resolver:
    """Resolves host names; the caller sets the timeout."""

    def __init__(self, lookup: Lookup = socket.getaddrinfo) -> None:
        self._lookup = lookup
        self._free_threads = asyncio.Semaphore(MAX_LOOKUPS)
        self._queued = 0

    async def resolve(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host name; an IP address resolves to itself.

        Raises:
            OSError, UnicodeError: The name does not exist or is invalid.
            UnreachableError: Too many lookups wait already.
        """
        if _is_address(host):
            return [host]
        if self._queued >= MAX_QUEUED_LOOKUPS:
            raise UnreachableError(f"{host}: too many names are being looked up")
        self._queued += 1
        try:
            await self._free_threads.acquire()
        finally:
            self._queued -= 1
        found = await asyncio.shield(self._start_lookup(host, port))
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    def _start_lookup(self, host: str, port: int) -> "asyncio.Future[Sequence[Any]]":
        """Start a lookup whose slot is freed when its thread ends.

        Its caller may be gone by then.
        """
        future: Future[Sequence[Any]] = Future()
        future.set_running_or_notify_cancel()
        result = asyncio.wrap_future(future)
        result.add_done_callback(self._on_lookup_done)
        # A daemon thread, because the process must not wait for it at exit.
        threading.Thread(
            target=self._run_lookup, args=(host, port, future), name="lookup of a name", daemon=True
        ).start()
        return result

    def _run_lookup(self, host: str, port: int, future: "Future[Sequence[Any]]") -> None:
        try:
            future.set_result(self._lookup(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            future.set_exception(error)

    def _on_lookup_done(self, result: "asyncio.Future[Sequence[Any]]") -> None:
        self._free_threads.release()
        _ = result.cancelled() or result.exception()  # retrieve it, because its caller may be gone


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
