"""Whatever a peer answers, a call ends with what the caller expects, or with a fault of the peer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from node.daemon.peers.peer_rpc import deliver, request_chain, request_relay
from protocol.errors import LimitError, MalformedError, UnreachableError
from protocol.murmur_pb2 import ChainReply, ChainRequest, DeliverReply, DeliverRequest, Signed
from protocol.murmur_pb2_grpc import RoundsServicer, add_RoundsServicer_to_server
from tests.node.daemon.peers.fake_channels import FixedChannels
from tests.node.small_run import PEERS, RUN_ID
from tests.protocol.garbled_server import garbled_channel
from tests.protocol.local_server import serve_locally

pytestmark = pytest.mark.slow

THEM = PEERS[3].peer_id


@pytest.fixture
async def channel(tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    async with garbled_channel(tmp_path / "s") as opened:
        yield opened


async def test_answers_that_do_not_parse_are_faults(channel: grpc.aio.Channel) -> None:
    for call in (
        deliver(RUN_ID, FixedChannels(channel), THEM, [], 5.0),
        request_chain(RUN_ID, lambda _: channel, THEM, 0),
        request_relay(RUN_ID, lambda _: channel, THEM, Signed(), bytes(32), 5.0),
    ):
        with pytest.raises(MalformedError, match="does not parse"):
            await call


class Silent(RoundsServicer):
    """Answers nothing."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def Chain(self, request: ChainRequest, context: Any) -> ChainReply:  # noqa: N802
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def Deliver(self, request: DeliverRequest, context: Any) -> DeliverReply:  # noqa: N802
        raise NotImplementedError


@asynccontextmanager
async def asked(folder: Path, catches: int) -> AsyncIterator[tuple[asyncio.Task[Any], grpc.aio.Channel]]:
    """A call under way, of a task that has caught so many cancels before; and its channel."""
    silent = Silent()

    async def ask(channel: grpc.aio.Channel) -> None:
        task = asyncio.current_task()
        assert task is not None
        for _ in range(catches):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        await request_chain(RUN_ID, lambda _: channel, THEM, 0)

    async with serve_locally(folder / "s", lambda server: add_RoundsServicer_to_server(silent, server)) as channel:
        task = asyncio.create_task(ask(channel))
        async with asyncio.timeout(20):
            await silent.asked.wait()
        yield task, channel


@pytest.mark.parametrize("catches", [0, 1])
async def test_a_channel_closed_under_a_call_ends_the_call_and_not_its_task(tmp_path: Path, catches: int) -> None:
    async with asked(tmp_path, catches) as (task, channel):
        await channel.close()
        with pytest.raises(UnreachableError, match="was closed"):
            await task


@pytest.mark.parametrize("catches", [0, 1])
async def test_a_task_that_is_cancelled_ends(tmp_path: Path, catches: int) -> None:
    async with asked(tmp_path, catches) as (task, _):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


class Talkative(RoundsServicer):
    async def Deliver(self, request: Any, context: Any) -> Any:  # noqa: N802
        await context.abort(grpc.StatusCode.INTERNAL, "no" * 2000)

    async def Chain(self, request: ChainRequest, context: Any) -> ChainReply:  # noqa: N802
        await context.abort(grpc.StatusCode.UNAVAILABLE, "no" * 2000)
        raise AssertionError("abort always raises")


async def test_of_what_a_peer_says_of_its_refusal_little_is_kept(tmp_path: Path) -> None:
    async with serve_locally(
        tmp_path / "s", lambda server: add_RoundsServicer_to_server(Talkative(), server)
    ) as channel:
        for ask, kind in (
            (lambda: deliver(RUN_ID, FixedChannels(channel), THEM, [], 5.0), LimitError),
            (lambda: request_chain(RUN_ID, lambda _: channel, THEM, 0), UnreachableError),
        ):
            with pytest.raises(kind) as caught:
                await ask()
            assert "no" * 100 in str(caught.value) and len(str(caught.value)) < 350


class Mailbox(RoundsServicer):
    """Counts what is delivered, and answers at once or never."""

    def __init__(self, *, answers: bool = True) -> None:
        self.letters = 0
        self._answers = answers

    async def Deliver(self, request: DeliverRequest, context: Any) -> DeliverReply:  # noqa: N802
        self.letters += 1
        if not self._answers:
            await asyncio.Event().wait()
        return DeliverReply()

    async def Chain(self, request: ChainRequest, context: Any) -> ChainReply:  # noqa: N802
        raise NotImplementedError


async def test_what_libp2p_cannot_deliver_goes_by_a_direct_path(tmp_path: Path) -> None:
    mailbox = Mailbox()
    async with (
        serve_locally(tmp_path / "s", lambda server: add_RoundsServicer_to_server(mailbox, server)) as direct,
        grpc.aio.insecure_channel(f"unix:{tmp_path}/nobody") as broken,
    ):
        await deliver(RUN_ID, FixedChannels(broken, direct), THEM, [Signed()], 5.0)
        assert mailbox.letters == 1
        await deliver(RUN_ID, FixedChannels(direct, direct), THEM, [Signed()], 5.0)
        assert mailbox.letters == 2, "once, where libp2p delivers"
        with pytest.raises(UnreachableError, match="does not answer"):
            await deliver(RUN_ID, FixedChannels(broken), THEM, [Signed()], 5.0)
        assert mailbox.letters == 2, "the control: without another path it is lost"


async def test_a_direct_path_without_work_delivers_first(tmp_path: Path) -> None:
    quick, usual = Mailbox(), Mailbox()
    async with (
        serve_locally(tmp_path / "q", lambda server: add_RoundsServicer_to_server(quick, server)) as direct,
        serve_locally(tmp_path / "s", lambda server: add_RoundsServicer_to_server(usual, server)) as channel,
        grpc.aio.insecure_channel(f"unix:{tmp_path}/nobody") as broken,
    ):
        await deliver(RUN_ID, FixedChannels(channel, idle=direct), THEM, [Signed()], 5.0)
        assert (quick.letters, usual.letters) == (1, 0)
        await deliver(RUN_ID, FixedChannels(channel, idle=broken), THEM, [Signed()], 5.0)
        assert (quick.letters, usual.letters) == (1, 1)


async def test_a_direct_path_that_is_silent_takes_no_more_than_half_the_time(tmp_path: Path) -> None:
    silent, usual = Mailbox(answers=False), Mailbox()
    async with (
        serve_locally(tmp_path / "f", lambda server: add_RoundsServicer_to_server(silent, server)) as direct,
        serve_locally(tmp_path / "s", lambda server: add_RoundsServicer_to_server(usual, server)) as channel,
    ):
        await deliver(RUN_ID, FixedChannels(channel, idle=direct), THEM, [Signed()], 1.0)
        assert (silent.letters, usual.letters) == (1, 1)
        with pytest.raises(UnreachableError, match="deadline"):
            await deliver(RUN_ID, FixedChannels(direct), THEM, [Signed()], 1.0)


async def test_a_peer_that_is_silent_has_the_time_of_one_call(tmp_path: Path) -> None:
    """A frozen peer does not answer by any path: it is given up no later for having two."""
    frozen, mailbox = Mailbox(answers=False), Mailbox()
    async with (
        serve_locally(tmp_path / "f", lambda server: add_RoundsServicer_to_server(frozen, server)) as silent,
        serve_locally(tmp_path / "s", lambda server: add_RoundsServicer_to_server(mailbox, server)) as direct,
    ):
        with pytest.raises(UnreachableError, match="deadline"):
            await deliver(RUN_ID, FixedChannels(silent, direct), THEM, [Signed()], 0.3)
        assert (frozen.letters, mailbox.letters) == (1, 0)
