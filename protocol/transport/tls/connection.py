"""A direct connection's bytes: what comes is decrypted into the memory that waits for it, and wakes us seldom.

A limited link delivers a few kilobytes at a time, and an event loop that wakes for each of them spends more on waking
than on all else. Who waits for much says so to the kernel (SO_RCVLOWAT): it keeps quiet until there is as much as
lately came in a twentieth of a second, or all that is missing. TCP goes on meanwhile: it acknowledges and widens its
window as if we read. Of the last TLS record a part may have come before, so its bytes are waited for one by one.

asyncio keeps 256 KiB for each connection with TLS. One that has ended must not be part of a cycle, or that stays until
the collector comes by: links that lose packets open and close dozens of connections a minute.

What the kernel knows of the packets that come in over a connection: Linux's struct tcp_info, read at the receiver.

A packet that arrives after a gap says that one before it was lost (or overtaken). Whether a full queue or a bad link
lost it shows in the round trip: behind a queue it takes much longer than the shortest one seen.
"""

import asyncio
import socket
import ssl
import struct
import sys
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from typing import Any, Final

READ_AHEAD_BYTES = 64 * 1024  # that come while nobody waits; then the sender is paused
MAX_TLS_RECORD_BYTES = 16 * 1024 + 512  # of TLS: what may lie in its buffers, not yet decrypted
WAKEUP_SECONDS = 0.05  # in which what comes wakes nobody
MEASURE_SECONDS = 0.1
SILENT_SECONDS = 0.5  # then the next byte counts again
YIELD_BYTES = 1024 * 1024  # written in one go, at most
MAX_WAKEUP_BYTES = 256 * 1024  # the kernel must have room for twice that
HAS_LOW_WATERMARK: Final = sys.platform == "linux"  # elsewhere, what lies there wakes nobody once less is waited for


class WakeupThreshold:
    """PURE: how many bytes need not wake anybody, from how fast they come."""

    def __init__(self, now: float) -> None:
        self.bytes = 1
        self._window_start = now
        self._last_received_at = now
        self._window_bytes = 0

    def record_bytes(self, size: int, now: float) -> None:
        self._window_bytes += size
        self._last_received_at = now
        seconds = now - self._window_start
        if seconds >= MEASURE_SECONDS:
            self.bytes = max(1, min(MAX_WAKEUP_BYTES, int(self._window_bytes / seconds * WAKEUP_SECONDS)))
            self._window_start = now
            self._window_bytes = 0

    def reset_if_silent(self, now: float) -> None:
        """Called now and then: what came fast may come slowly, or not at all."""
        if now - self._last_received_at >= SILENT_SECONDS:
            self.bytes = 1


class TlsConnection(asyncio.BufferedProtocol):
    """Both directions. One task at a time may read."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._read_ahead = bytearray(READ_AHEAD_BYTES)
        self._read_ahead_start = self._read_ahead_end = 0  # of what lies in it
        self._unfilled = memoryview(b"")  # what is still to be filled
        self._waiter: asyncio.Future[None] | None = None
        self.filled_bytes = 0  # bytes that the last `fill` brought, also where it was cancelled or failed
        self._wakeup_threshold = WakeupThreshold(self._loop.time())
        self._low_watermark = 1
        self._transport: asyncio.Transport | None = None  # while it is connected
        self._end_reason: Exception | None = None
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._closed = self._loop.create_future()
        self._written_since_yield = 0  # since the event loop could say anything

    # What a reader and a writer see.

    async def fill(self, view: memoryview) -> None:
        """All of it. EOFError, OSError: the connection has ended before."""
        self.filled_bytes = 0
        self._unfilled = view
        self._take_read_ahead()
        try:
            while self._unfilled:
                if self._end_reason:
                    raise copy(self._end_reason)  # its traceback names us
                self._waiter = self._loop.create_future()
                self._set_low_watermark()
                await self._waiter
        finally:
            self._waiter = None
            self._unfilled = memoryview(b"")

    async def read(self, size: int) -> bytes:
        """So many bytes; errors as of `fill`."""
        data = bytearray(size)
        await self.fill(memoryview(data))
        return bytes(data)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Nothing, where it has ended: `drain` says so."""
        if self._transport:
            self._transport.write(data)
        self._written_since_yield += len(data)

    async def drain(self) -> None:
        """Until there is room for more. ConnectionError: it has ended."""
        # So that it can be told to those who only write: where the other end has reset the connection, TLS does not
        # know that it is closing, and swallows whatever is written.
        if self._is_closing or self._written_since_yield >= YIELD_BYTES:
            self._written_since_yield = 0
            await asyncio.sleep(0)
        await self._can_write.wait()
        if self._closed.done():
            raise ConnectionResetError("the connection is lost")

    async def wait_closed(self) -> None:
        await asyncio.shield(self._closed)

    def abort(self) -> None:
        if self._transport:
            self._transport.abort()

    @property
    def has_ended(self) -> bool:
        return self._end_reason is not None or self._is_closing

    @property
    def _is_closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    @property
    def unsent_bytes(self) -> int:
        """Bytes written that the kernel has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    @property
    def socket(self) -> socket.socket:
        """ConnectionError: it has ended."""
        connection: socket.socket = self._extra_info("socket")
        return connection

    @property
    def ssl_object(self) -> ssl.SSLObject:
        """ConnectionError: it has ended."""
        tls: ssl.SSLObject = self._extra_info("ssl_object")
        return tls

    def peer_certificate(self) -> bytes:
        """The other end's, in DER."""
        certificate = self.ssl_object.getpeercert(binary_form=True)
        assert certificate is not None
        return certificate

    def _extra_info(self, name: str) -> Any:
        if self._transport is None:
            raise ConnectionResetError("the connection is lost")
        return self._transport.get_extra_info(name)

    def check_silence(self) -> None:
        """To be called about once a second: where nothing has come for long, the next byte is heard."""
        self._wakeup_threshold.reset_if_silent(self._loop.time())
        if self._waiter:
            self._set_low_watermark()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._unfilled or memoryview(self._read_ahead)[self._read_ahead_end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._wakeup_threshold.record_bytes(nbytes, self._loop.time())
        if not self._unfilled:
            self._read_ahead_end += nbytes
            if self._read_ahead_end == READ_AHEAD_BYTES and self._transport:
                self._transport.pause_reading()
            return
        self._advance(nbytes)
        if not self._unfilled:
            self._wake()
        else:
            self._set_low_watermark()

    def eof_received(self) -> None:
        self._mark_ended(EOFError("the connection was closed"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._mark_ended(exc or EOFError("the connection was closed"))
        self._can_write.set()
        if not self._closed.done():
            self._closed.set_result(None)

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def _advance(self, size: int) -> None:
        self._unfilled = self._unfilled[size:]
        self.filled_bytes += size

    def _take_read_ahead(self) -> None:
        """What came before anybody waited for it."""
        size = min(len(self._unfilled), self._read_ahead_end - self._read_ahead_start)
        self._unfilled[:size] = memoryview(self._read_ahead)[self._read_ahead_start : self._read_ahead_start + size]
        self._read_ahead_start += size
        self._advance(size)
        if self._read_ahead_start == self._read_ahead_end:
            was_full, self._read_ahead_start, self._read_ahead_end = self._read_ahead_end == READ_AHEAD_BYTES, 0, 0
            if was_full and self._transport and not self._transport.is_closing():
                self._transport.resume_reading()

    def _mark_ended(self, reason: Exception) -> None:
        if self._end_reason is None:
            self._end_reason = copy(reason)  # the traceback of asyncio's own names its TLS, which names us
        self._wake()

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    def _set_low_watermark(self) -> None:
        """Have the kernel wake us for no less than is worth while."""
        least = (
            max(1, min(self._wakeup_threshold.bytes, len(self._unfilled) - MAX_TLS_RECORD_BYTES))
            if HAS_LOW_WATERMARK
            else 1
        )
        if least != self._low_watermark:
            self._low_watermark = least
            with suppress(OSError):  # closed by now
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)


# Offsets of 32-bit numbers; an older kernel gives a shorter struct.
ROUND_TRIP_OFFSET, MIN_ROUND_TRIP_OFFSET, OUT_OF_ORDER_OFFSET = 92, 148, 224
TCP_INFO_BYTES = OUT_OF_ORDER_OFFSET + 4
QUEUED_RATIO = 1.5  # times the shortest round trip: packets wait somewhere


@dataclass(frozen=True)
class TcpReceiveStats:
    """`round_trip` now and at the `shortest`, in the same unit; `disordered`: packets so far that came after a gap."""

    round_trip: int = 0
    min_round_trip: int = 0
    out_of_order_packets: int = 0

    @property
    def is_queued(self) -> bool:
        """Whether packets wait somewhere on their way: then the link there is full."""
        return self.round_trip > QUEUED_RATIO * self.min_round_trip


def read_tcp_receive_stats(connection: socket.socket) -> TcpReceiveStats:
    """Zeros where the kernel does not say, or the connection is closed."""
    if connection.fileno() < 0:
        return TcpReceiveStats()
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    if len(info) < TCP_INFO_BYTES:
        return TcpReceiveStats()
    return TcpReceiveStats(
        *(
            struct.unpack_from("=I", info, at)[0]
            for at in (ROUND_TRIP_OFFSET, MIN_ROUND_TRIP_OFFSET, OUT_OF_ORDER_OFFSET)
        )
    )


def count_link_losses(before: TcpReceiveStats, after: TcpReceiveStats) -> int:
    """How many packets show, between two looks, that a bad link loses some, and not a queue that is full."""
    if after.is_queued or after.round_trip == 0:  # not known yet
        return 0
    return max(0, after.out_of_order_packets - before.out_of_order_packets)
