"""The bytes of a direct TLS connection, decrypted into the reader's buffer with few wake-ups, and its TCP statistics.

A limited link delivers a few kilobytes at a time, and an event loop that wakes for each of them spends most of its time
waking. A reader that waits for many bytes therefore tells the kernel so (SO_RCVLOWAT). The kernel stays quiet until it
holds as much as recently arrived in a twentieth of a second, or everything that is missing. TCP continues meanwhile: it
acknowledges and widens its window as if we read. A part of the last TLS record may have arrived before, so the last
bytes are awaited one by one.

asyncio keeps 256 KiB per TLS connection. A connection that has ended must not be part of a reference cycle, or that
memory stays until the garbage collector runs, and lossy links open and close dozens of connections a minute.

`TcpReceiveStats` holds figures of the kernel about arriving packets: Linux's struct tcp_info, read at the receiver. A
packet that arrives after a gap shows that one before it was lost (or overtaken). The round trip shows whether a full
queue or a bad link lost it: behind a queue it is much longer than the shortest one seen.
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

READ_AHEAD_BYTES = 64 * 1024  # received while no reader waits; then the sender is paused
MAX_TLS_RECORD_BYTES = 16 * 1024 + 512  # may be in the buffers of TLS, not yet decrypted
WAKEUP_SECONDS = 0.05  # bytes that arrive within this time cause one wake-up
MEASURE_SECONDS = 0.1
SILENT_SECONDS = 0.5  # after this silence the next byte wakes the reader
YIELD_BYTES = 1024 * 1024  # written without yielding, at most
MAX_WAKEUP_BYTES = 256 * 1024  # the kernel must have room for twice that
HAS_LOW_WATERMARK: Final = sys.platform == "linux"  # elsewhere, lowering the mark does not wake for bytes already there


class WakeupThreshold:
    """Computes how many bytes may arrive before a wake-up, from their rate.

    The caller passes the time.
    """

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
        """Reset to one byte after a silence.

        A fast sender may become slow or stop.
        """
        if now - self._last_received_at >= SILENT_SECONDS:
            self.bytes = 1


class TlsConnection(asyncio.BufferedProtocol):
    """Both directions of a direct connection, owned by its listener or dialler.

    One task at a time may read.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._read_ahead = bytearray(READ_AHEAD_BYTES)
        self._read_ahead_start = self._read_ahead_end = 0  # range of unread bytes
        self._unfilled = memoryview(b"")  # part of the reader's buffer that is not filled yet
        self._waiter: asyncio.Future[None] | None = None
        self.filled_bytes = 0  # bytes that the last `fill` received, even if it was cancelled or failed
        self._wakeup_threshold = WakeupThreshold(self._loop.time())
        self._low_watermark = 1
        self._transport: asyncio.Transport | None = None  # while it is connected
        self._end_reason: Exception | None = None
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._closed = self._loop.create_future()
        self._written_since_yield = 0

    # Called by the reader and the writer.

    async def fill(self, view: memoryview) -> None:
        """Fill the whole view; raise EOFError or OSError if the connection ends before."""
        self.filled_bytes = 0
        self._unfilled = view
        self._take_read_ahead()
        try:
            while self._unfilled:
                if self._end_reason:
                    raise copy(self._end_reason)  # a copy, because its traceback would refer to this object
                self._waiter = self._loop.create_future()
                self._set_low_watermark()
                await self._waiter
        finally:
            self._waiter = None
            self._unfilled = memoryview(b"")

    async def read(self, size: int) -> bytes:
        """Read exactly `size` bytes; raise as `fill` does."""
        data = bytearray(size)
        await self.fill(memoryview(data))
        return bytes(data)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write without waiting.

        After the connection has ended this does nothing, and `drain` reports it.
        """
        if self._transport:
            self._transport.write(data)
        self._written_since_yield += len(data)

    async def drain(self) -> None:
        """Wait until there is room for more.

        Raises ConnectionError if the connection has ended.
        """
        # Yielding lets the event loop notice a reset by the other end: TLS does not know then that it is closing and
        # swallows all writes, so a task that only writes would never learn of it.
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
        """Return the number of written bytes that the kernel has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    @property
    def socket(self) -> socket.socket:
        """Return the socket; raise ConnectionError if the connection has ended."""
        connection: socket.socket = self._extra_info("socket")
        return connection

    @property
    def ssl_object(self) -> ssl.SSLObject:
        """Return the TLS object; raise ConnectionError if the connection has ended."""
        tls: ssl.SSLObject = self._extra_info("ssl_object")
        return tls

    def peer_certificate(self) -> bytes:
        """Return the other end's certificate in DER."""
        certificate = self.ssl_object.getpeercert(binary_form=True)
        assert certificate is not None
        return certificate

    def _extra_info(self, name: str) -> Any:
        if self._transport is None:
            raise ConnectionResetError("the connection is lost")
        return self._transport.get_extra_info(name)

    def check_silence(self) -> None:
        """Lower the wake-up threshold after a silence; called about once a second."""
        self._wakeup_threshold.reset_if_silent(self._loop.time())
        if self._waiter:
            self._set_low_watermark()

    # Called by the event loop.

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
        """Copy the bytes that arrived before the reader asked for them."""
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
            self._end_reason = copy(reason)  # a copy, because asyncio's traceback refers through its TLS to this object
        self._wake()

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    def _set_low_watermark(self) -> None:
        """Let the kernel wake us only for a worthwhile number of bytes."""
        watermark = (
            max(1, min(self._wakeup_threshold.bytes, len(self._unfilled) - MAX_TLS_RECORD_BYTES))
            if HAS_LOW_WATERMARK
            else 1
        )
        if watermark != self._low_watermark:
            self._low_watermark = watermark
            with suppress(OSError):  # closed by now
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, watermark)


# Offsets of 32-bit numbers; an older kernel returns a shorter struct.
ROUND_TRIP_OFFSET, MIN_ROUND_TRIP_OFFSET, OUT_OF_ORDER_OFFSET = 92, 148, 224
TCP_INFO_BYTES = OUT_OF_ORDER_OFFSET + 4
QUEUED_RATIO = 1.5  # a round trip this many times the shortest means that packets wait in a queue


@dataclass(frozen=True)
class TcpReceiveStats:
    """Kernel figures of a receiving connection.

    Both round trips are in the same unit; `out_of_order_packets` counts the packets so far that came after a gap.
    """

    round_trip: int = 0
    min_round_trip: int = 0
    out_of_order_packets: int = 0

    @property
    def is_queued(self) -> bool:
        """Return whether packets wait in a queue, so that the link there is full."""
        return self.round_trip > QUEUED_RATIO * self.min_round_trip


def read_tcp_receive_stats(connection: socket.socket) -> TcpReceiveStats:
    """Read the statistics of a connection.

    All are zero if the kernel does not provide them or the connection is closed.
    """
    if connection.fileno() < 0:
        return TcpReceiveStats()
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    if len(info) < TCP_INFO_BYTES:
        return TcpReceiveStats()
    return TcpReceiveStats(
        *(
            struct.unpack_from("=I", info, offset)[0]
            for offset in (ROUND_TRIP_OFFSET, MIN_ROUND_TRIP_OFFSET, OUT_OF_ORDER_OFFSET)
        )
    )


def count_link_losses(before: TcpReceiveStats, after: TcpReceiveStats) -> int:
    """Return how many packets between two readings indicate a lossy link.

    Losses in a full queue do not count.
    """
    if after.is_queued or after.round_trip == 0:  # 0: not measured yet
        return 0
    return max(0, after.out_of_order_packets - before.out_of_order_packets)
