"""The first machine's listener: it admits by the token alone, names each fault, and lets nobody else reach a rank."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import BaseModel

from node.monitoring.peer_lines import PeerNames
from node.trainer.ipc.channel import ChannelClosed, SiteConfig, TrainerChannel
from node.trainer.site import head
from node.trainer.site.agent import SiteAgent, SiteMember
from node.trainer.site.head import SiteHead, SiteRules
from node.trainer.site.messages import (
    TO_MACHINE,
    Machine,
    Opening,
    OpenTunnel,
    Refused,
    Target,
    Welcome,
    own_host,
    receive,
    send,
)
from node.trainer.site.token import SiteToken, load_site_key
from protocol.errors import AdmissionError, DeviceError, PortTakenError, UsageError
from protocol.identity import Identity
from protocol.transport.tls.handshake import make_client_context

pytestmark = pytest.mark.slow
VERSION = "torch 9, Python 3"
SECRET_WEIGHTS = b"weights"


class Site:
    """A listening first machine without ranks; a target of its tunnels says SECRET_WEIGHTS."""

    def __init__(self, folder: Path) -> None:
        self.token = SiteToken.of(load_site_key(folder / "site-key"))
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self.config = SiteConfig(host="127.0.0.1", port=self.port, key=str(folder / "site-key"))
        self.daemon, self.trainer = socket.socketpair()
        self.rules = SiteRules(VERSION, 1, "cpu")
        self.channel = TrainerChannel(self.trainer)
        self.head = SiteHead(self.config, self.rules, self.channel)
        self.store = socket.create_server(("127.0.0.1", 0))
        target = Target(number=0, host=own_host(), address="127.0.0.1", port=self.store.getsockname()[1])
        self.head.gather(0)
        self.head.forward([(target, None)])

    def close(self) -> None:
        self.head.close(0)
        for connection in (self.daemon, self.trainer, self.store):
            connection.close()

    async def serve_store(self) -> None:
        reader, writer = await asyncio.open_connection(sock=(await asyncio.to_thread(self.store.accept))[0])
        writer.write(SECRET_WEIGHTS)
        await writer.drain()
        await reader.read()
        await close(writer)

    def member(self, **changes: object) -> SiteMember:
        member = SiteMember("127.0.0.1", self.port, self.token, ("cpu",), ("cpu",), VERSION, 1)
        return replace(member, **changes)  # type: ignore[arg-type]

    async def open(self, secret: str, what: Machine | OpenTunnel) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        streams = await asyncio.open_connection("127.0.0.1", self.port, ssl=make_client_context())
        await send(streams[1], Opening(secret=secret, what=what))
        return streams


async def close(writer: asyncio.StreamWriter) -> None:
    """Close a connection, and wait until its socket is closed."""
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.close()


def offer(name: str = "a") -> Machine:
    return Machine(machine=name, host="there", version=VERSION, devices=("cpu",), names=("cpu",))


async def test_machine_with_the_token_is_welcome_and_one_with_another_is_refused_in_one_line(site: Site) -> None:
    other = replace(site.token, secret="0" * 64)
    with pytest.raises(AdmissionError, match="^the first machine refused the token; copy the line that it prints$"):
        await SiteAgent(site.member(token=other)).run()
    reader, writer = await site.open(site.token.secret, offer())
    answer = await receive(reader, TO_MACHINE)
    assert isinstance(answer, Welcome), "control: the right token"
    await close(writer)


async def test_machine_that_offers_itself_twice_at_once_is_welcome_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = asyncio.Event()

    async def send_late(writer: asyncio.StreamWriter, message: BaseModel) -> None:
        if isinstance(message, Welcome):
            await released.wait()
        await send(writer, message)

    monkeypatch.setattr(head, "send", send_late)
    streams = [await site.open(site.token.secret, offer()) for _ in range(2)]
    answers = [asyncio.create_task(receive(reader, TO_MACHINE)) for reader, _ in streams]
    answered, _ = await asyncio.wait(answers, timeout=5, return_when=asyncio.FIRST_COMPLETED)
    site.head._loop.call_soon_threadsafe(released.set)
    assert {type(await answer) for answer in answers if answer not in answered} == {Welcome}
    assert [type(answer.result()) for answer in answered] == [Refused]
    for _, writer in streams:
        await close(writer)


async def test_secret_is_not_shown_to_a_machine_with_another_key(site: Site) -> None:
    """Control: with its own key, the first machine gets the secret and welcomes the caller."""
    impostor = SiteToken(Identity.create().peer_id, site.token.secret)
    with pytest.raises(AdmissionError, match="has another key than the token names"):
        await SiteAgent(site.member(token=impostor)).run()


@pytest.mark.parametrize("has_token", [False, True])
async def test_store_of_the_ranks_is_reached_with_the_token_only(has_token: bool, site: Site) -> None:
    serving = asyncio.create_task(site.serve_store()) if has_token else None
    reader, writer = await site.open(site.token.secret if has_token else "1" * 64, OpenTunnel(target=0))
    answer = await asyncio.wait_for(reader.read(1000), 20)
    assert (answer == SECRET_WEIGHTS) is has_token and (b"refused the token" in answer) is not has_token
    await close(writer)
    if serving is not None:
        await asyncio.wait_for(serving, 20)


async def test_stranger_that_says_nothing_or_speaks_no_tls_is_dropped(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.trainer.site.head.OPENING_SECONDS", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port, ssl=make_client_context())
    assert await asyncio.wait_for(reader.read(), 20) == b""
    await close(writer)
    plain = await asyncio.open_connection("127.0.0.1", site.port)
    plain[1].write(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises((ConnectionError, ssl.SSLError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(plain[0].readexactly(1000), 20)
    await close(plain[1])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": "torch 8, Python 3"}, "the first machine has torch 9, Python 3, this one torch 8, Python 3"),
        ({"devices": ("cuda:0",)}, "the first machine trains on cpu"),
        ({"devices": ("cpu", "cpu"), "names": ("cpu", "cpu")}, "needs 1 devices, and this one offers 2"),
    ],
)
async def test_machine_that_does_not_fit_is_refused_in_one_line(
    changes: dict[str, object], words: str, site: Site
) -> None:
    with pytest.raises(DeviceError, match=words):
        await SiteAgent(site.member(**changes)).run()


async def test_orders_before_the_token_are_not_obeyed(site: Site) -> None:
    reader, writer = await site.open("", offer())
    answer = await receive(reader, TO_MACHINE)
    assert isinstance(answer, Refused) and answer.exit_code == AdmissionError.exit_code
    with pytest.raises(ChannelClosed, match="0 bytes"):
        await receive(reader, TO_MACHINE)
    await close(writer)


def test_taken_port_is_named(site: Site) -> None:
    with pytest.raises(PortTakenError, match="--site: cannot listen at 127.0.0.1"):
        SiteHead(site.config, site.rules, TrainerChannel(site.daemon))


@pytest.mark.parametrize("text", ["", "abc", "0" * 88, "1" * 88])
def test_text_that_is_not_a_token_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--token: this is not a token"):
        SiteToken.parse(text)


def test_token_survives_its_text_and_a_log(site: Site) -> None:
    assert SiteToken.parse(f" {site.token}\n") == site.token
    line = PeerNames().replace_ids(f"--token {site.token}")
    assert SiteToken.parse(line.removeprefix("--token ")) == site.token
    assert site.token.head not in PeerNames().replace_ids(site.token.head), "control: logs shorten peer ids"
    assert site.token.secret not in repr(site.token), "logs of an error do not show it"
