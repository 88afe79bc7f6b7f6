"""A direct connection's bytes: what comes is decrypted into the memory that waits for it, and wakes us seldom.

A limited link delivers a few kilobytes at a time, and an event loop that wakes for each of them spends more on waking
than on all else. Who waits for much says so to the kernel (SO_RCVLOWAT): it keeps quiet until there is as much as
lately came in a twentieth of a second, or all that is missing. TCP goes on meanwhile: it acknowledges and widens its
window as if we read. Of the last TLS record a part may have come before, so its bytes are waited for one by one.

asyncio keeps 256 KiB for each connection with TLS. One that has ended must not be part of a cycle, or that stays until
the collector comes by: links that lose packets open and close dozens of connections a minute.
"""

import asyncio
import socket
import ssl
import sys
from contextlib import suppress
from copy import copy
from typing import Any, Final

SPILL_BYTES = 64 * 1024  # that come while nobody waits; then the sender is paused
RECORD_BYTES = 16 * 1024 + 512  # of TLS: what may lie in its buffers, not yet decrypted
QUIET_SECONDS = 0.05  # in which what comes wakes nobody
MEASURED_SECONDS = 0.1
SILENT_SECONDS = 0.5  # then the next byte counts again
YIELD_BYTES = 1024 * 1024  # written in one go, at most
MOST_QUIET_BYTES = 256 * 1024  # the kernel must have room for twice that
CAN_BE_QUIET: Final = sys.platform == "linux"  # elsewhere, what lies there wakes nobody once less is waited for


class Quiet:
    """PURE: how many bytes need not wake anybody, from how fast they come."""

    def __init__(self, now: float) -> None:
        self.bytes = 1
        self._since = now
        self._heard = now
        self._came = 0

    def came(self, size: int, now: float) -> None:
        self._came += size
        self._heard = now
        seconds = now - self._since
        if seconds >= MEASURED_SECONDS:
            self.bytes = max(1, min(MOST_QUIET_BYTES, int(self._came / seconds * QUIET_SECONDS)))
            self._since = now
            self._came = 0

    def look(self, now: float) -> None:
        """Called now and then: what came fast may come slowly, or not at all."""
        if now - self._heard >= SILENT_SECONDS:
            self.bytes = 1


class Connection(asyncio.BufferedProtocol):
    """Both directions. One task at a time may read."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._spill = bytearray(SPILL_BYTES)
        self._start = self._stop = 0  # of what lies in it
        self._wanted = memoryview(b"")  # what is still to be filled
        self._waiter: asyncio.Future[None] | None = None
        self.placed = 0  # bytes that the last `fill` brought, also where it was cancelled or failed
        self._quiet = Quiet(self._loop.time())
        self._low_water = 1
        self._transport: asyncio.Transport | None = None  # while it is connected
        self._ended: Exception | None = None
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._closed = self._loop.create_future()
        self._written = 0  # since the event loop could say anything

    # What a reader and a writer see.

    async def fill(self, view: memoryview) -> None:
        """All of it. EOFError, OSError: the connection has ended before."""
        self.placed = 0
        self._wanted = view
        self._take_spilt()
        try:
            while self._wanted:
                if self._ended:
                    raise copy(self._ended)  # its traceback names us
                self._waiter = self._loop.create_future()
                self._hush()
                await self._waiter
        finally:
            self._waiter = None
            self._wanted = memoryview(b"")

    async def read(self, size: int) -> bytes:
        """So many bytes; errors as of `fill`."""
        data = bytearray(size)
        await self.fill(memoryview(data))
        return bytes(data)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Nothing, where it has ended: `drain` says so."""
        if self._transport:
            self._transport.write(data)
        self._written += len(data)

    async def drain(self) -> None:
        """Until there is room for more. ConnectionError: it has ended."""
        # So that it can be told to those who only write: where the other end has reset the connection, TLS does not
        # know that it is closing, and swallows whatever is written.
        if self._is_closing or self._written >= YIELD_BYTES:
            self._written = 0
            await asyncio.sleep(0)
        await self._has_room.wait()
        if self._closed.done():
            raise ConnectionResetError("the connection is lost")

    async def wait_closed(self) -> None:
        await asyncio.shield(self._closed)

    def abort(self) -> None:
        if self._transport:
            self._transport.abort()

    @property
    def has_ended(self) -> bool:
        return self._ended is not None or self._is_closing

    @property
    def _is_closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    @property
    def pending(self) -> int:
        """Bytes written that the kernel has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    @property
    def socket(self) -> socket.socket:
        """ConnectionError: it has ended."""
        connection: socket.socket = self._extra("socket")
        return connection

    @property
    def tls(self) -> ssl.SSLObject:
        """ConnectionError: it has ended."""
        tls: ssl.SSLObject = self._extra("ssl_object")
        return tls

    def certificate(self) -> bytes:
        """The other end's, in DER."""
        certificate = self.tls.getpeercert(binary_form=True)
        assert certificate is not None
        return certificate

    def _extra(self, name: str) -> Any:
        if self._transport is None:
            raise ConnectionResetError("the connection is lost")
        return self._transport.get_extra_info(name)

    def look(self) -> None:
        """To be called about once a second: where nothing has come for long, the next byte is heard."""
        self._quiet.look(self._loop.time())
        if self._waiter:
            self._hush()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._wanted or memoryview(self._spill)[self._stop :]

    def buffer_updated(self, nbytes: int) -> None:
        self._quiet.came(nbytes, self._loop.time())
        if not self._wanted:
            self._stop += nbytes
            if self._stop == SPILL_BYTES and self._transport:
                self._transport.pause_reading()
            return
        self._advance(nbytes)
        if not self._wanted:
            self._wake()
        else:
            self._hush()

    def eof_received(self) -> None:
        self._end(EOFError("the connection was closed"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._end(exc or EOFError("the connection was closed"))
        self._has_room.set()
        if not self._closed.done():
            self._closed.set_result(None)

    def pause_writing(self) -> None:
        self._has_room.clear()

    def resume_writing(self) -> None:
        self._has_room.set()

    def _advance(self, size: int) -> None:
        self._wanted = self._wanted[size:]
        self.placed += size

    def _take_spilt(self) -> None:
        """What came before anybody waited for it."""
        size = min(len(self._wanted), self._stop - self._start)
        self._wanted[:size] = memoryview(self._spill)[self._start : self._start + size]
        self._start += size
        self._advance(size)
        if self._start == self._stop:
            was_full, self._start, self._stop = self._stop == SPILL_BYTES, 0, 0
            if was_full and self._transport and not self._transport.is_closing():
                self._transport.resume_reading()

    def _end(self, reason: Exception) -> None:
        if self._ended is None:
            self._ended = copy(reason)  # the traceback of asyncio's own names its TLS, which names us
        self._wake()

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    def _hush(self) -> None:
        """Have the kernel wake us for no less than is worth while."""
        least = max(1, min(self._quiet.bytes, len(self._wanted) - RECORD_BYTES)) if CAN_BE_QUIET else 1
        if least != self._low_water:
            self._low_water = least
            with suppress(OSError):  # closed by now
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
