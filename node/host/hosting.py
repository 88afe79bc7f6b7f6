"""A host's own work, beside whatever node it looks through: the journal, the watch and the page."""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial

from node.folder import RunFolder
from node.host.events import Facts, Opened
from node.host.journal import NAME
from node.host.recorder import Recorder
from node.host.server import Face, application
from node.host.watch import Watch
from node.host.window import Window
from node.model import shape_table
from node.web import EVERYWHERE, host_and_port, listening, serving
from protocol.errors import MurmurError, TransportError, UnreachableError, UsageError
from protocol.identity import PeerId
from protocol.manifest import Manifest
from protocol.network.reach import own_address
from protocol.signed_manifest import fingerprint, seal

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
MAX_BOOTSTRAP = 8  # addresses in the manifest that is served
OWN_ADDRESSES = 4  # of them ours
SEAL_SECONDS = 5.0  # that a signed text is served for
LOOPBACK = ("/ip4/127.", "/ip6/::1/")


@dataclass(frozen=True)
class Door:
    """Where the page is served, and how others reach it where that differs."""

    host: str
    port: int
    public_url: str | None = None

    @classmethod
    def parse(cls, address: str, public_url: str | None) -> "Door":
        """`HOST:PORT`, `:PORT` or `PORT`. Raises UsageError."""
        host, port = host_and_port(address, "--http")
        if public_url is not None and not re.match(r"^https?://[^\s/]+(/[^\s]*)?$", public_url):
            raise UsageError(f"--public-url: {public_url!r} is no URL; write it like https://run.example.org")
        return cls(host, port, public_url.rstrip("/") if public_url else None)

    @property
    def is_this_machine_alone(self) -> bool:
        return self.public_url is None and self.host in ("127.0.0.1", "localhost", "::1")

    def base(self, port: int) -> str:
        """How others reach what is served at that port, without a slash at the end."""
        host = own_address() if self.host in EVERYWHERE else self.host
        return self.public_url or f"http://{f'[{host}]' if ':' in host else host}:{port}"


def facts_of(manifest: Manifest, organiser: PeerId) -> Facts:
    return Facts(
        run=manifest.run.name,
        run_id=manifest.run_id,
        recipe=manifest.method.recipe,
        parameters=shape_table(manifest.model).numel,
        batch_tokens=manifest.train.batch_tokens,
        min_peers=manifest.run.min_peers,
        target_rounds=manifest.target.rounds,
        target_tokens=manifest.target.tokens,
        organiser=organiser,
        expiry=manifest.membership.expiry,
    )


class Seal:
    """The signed manifest, with addresses at which the run is found now."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._text = b""
        self._until = 0.0

    async def text(self) -> bytes:
        if time.monotonic() > self._until:
            manifest = self._window.manifest
            run = manifest.run.model_copy(update={"bootstrap": await self._bootstrap()})
            self._text = seal(manifest.model_copy(update={"run": run}), self._window.identity)
            self._until = time.monotonic() + SEAL_SECONDS
        return self._text

    async def _bootstrap(self) -> tuple[str, ...]:
        """Ours first, then what the manifest says, then one of each of some peers: any of them is enough to join."""
        try:
            own = await self._window.transport.addresses()
        except (TransportError, UnreachableError) as error:
            logger.warning("our own addresses cannot be read now: %s", error)
            own = ()
        neighbours = self._window.directory.neighbours().values()
        others = [addresses[0] for addresses in map(reachable_first, neighbours) if addresses]
        chosen = [*reachable_first(own)[:OWN_ADDRESSES], *self._window.manifest.run.bootstrap, *others]
        return tuple(dict.fromkeys(chosen))[:MAX_BOOTSTRAP]


def reachable_first(addresses: Sequence[str]) -> list[str]:
    """Those of this machine alone come last."""
    return sorted(addresses, key=lambda address: address.startswith(LOOPBACK))


@dataclass(frozen=True)
class Hosting:
    """`watch` ends only by a fault; `page` is its address."""

    watch: asyncio.Task[None]
    recorder: Recorder
    page: str


@contextlib.asynccontextmanager
async def hosting(window: Window, folder: RunFolder, door: Door) -> AsyncIterator[Hosting]:
    """Watches and serves while inside."""
    facts = facts_of(window.manifest, window.peer_id)
    listener = listening(door.host, door.port, "--http")
    recorder = Recorder.at(folder.path / NAME, Opened(at=time.time(), facts=facts))
    watch = asyncio.create_task(Watch(window, recorder).run(), name="watch")
    watch.add_done_callback(partial(_ended, trains=window.trains))
    face = Face(recorder, Seal(window).text, door.public_url, watches=lambda: not watch.done())
    try:
        async with serving(application(face), listener, MAX_CONNECTIONS) as port:
            base = door.base(port)
            _say(facts, base, door.is_this_machine_alone)
            yield Hosting(watch, recorder, f"{base}/")
    finally:
        watch.cancel()
        await asyncio.wait({watch})
        recorder.close()


def _say(facts: Facts, base: str, alone: bool) -> None:
    print(f"page         {base}/", flush=True)
    print(f"to take part murmur join {base}/run.toml", flush=True)
    print(f"fingerprint  {fingerprint(facts.organiser)}", flush=True)
    if alone:
        print("open to      this machine alone; --http 0.0.0.0:PORT opens it to others", flush=True)


def _ended(task: asyncio.Task[None], trains: bool) -> None:
    """What a person can mend is told in one line; the traceback is for what nobody has thought of."""
    if task.cancelled() or (error := task.exception()) is None:
        return
    goes_on = "; training goes on" if trains else ""
    if isinstance(error, MurmurError):
        logger.error("the watch has ended, the page stands still%s: %s", goes_on, error)
    else:
        logger.error("the watch has ended, the page stands still%s", goes_on, exc_info=error)
