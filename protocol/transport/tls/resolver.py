"""Names of hosts, looked up in threads of their own.

A lookup cannot be ended: under a name server that says nothing its thread stays for half a minute. Others choose the
names, so these threads must not be those in which anything else is done, and there are few of them.
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
MAX_QUEUED_LOOKUPS = 64  # all lanes to a peer, and some others'

Lookup = Callable[..., Sequence[Any]]  # as socket.getaddrinfo


class Resolver:
    """`addresses` waits as long as its caller does: an end is for him to set."""

    def __init__(self, lookup: Lookup = socket.getaddrinfo) -> None:
        self._lookup = lookup
        self._free_threads = asyncio.Semaphore(MAX_LOOKUPS)
        self._queued = 0

    async def resolve(self, host: str, port: int) -> list[str]:
        """Of a name, or of an address, which is its own. OSError, UnicodeError: it is none; UnreachableError: too many
        wait for theirs."""
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
        """Its place is free again when the thread has ended, however long its caller has been gone."""
        future: Future[Sequence[Any]] = Future()
        future.set_running_or_notify_cancel()
        found = asyncio.wrap_future(future)
        found.add_done_callback(self._on_lookup_done)
        # A daemon: the process must not wait for it at its end.
        threading.Thread(
            target=self._run_lookup, args=(host, port, future), name="lookup of a name", daemon=True
        ).start()
        return found

    def _run_lookup(self, host: str, port: int, future: "Future[Sequence[Any]]") -> None:
        try:
            future.set_result(self._lookup(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            future.set_exception(error)

    def _on_lookup_done(self, found: "asyncio.Future[Sequence[Any]]") -> None:
        self._free_threads.release()
        _ = found.cancelled() or found.exception()  # its caller may be gone


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
