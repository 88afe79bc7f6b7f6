"""`murmur host` and `murmur replay`."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from node.config import EVERYWHERE_LISTEN, NodeSettings, node_settings
from node.daemon.assembly import Assembly
from node.daemon.lifecycle import run_node, settled
from node.daemon.memory import collect_often, give_back_often
from node.daemon.metrics import Metrics, metrics_server
from node.descriptors import raise_limit
from node.folder import RunFolder
from node.host.advertisement import advertisement
from node.host.hosting import MAX_CONNECTIONS, Door, hosting
from node.host.journal import read_events
from node.host.observer import Observer, watching
from node.host.recorder import Recorder
from node.host.server import Face, application
from node.host.status import watching_status
from node.host.window import Window, window_of
from node.logs import configure_logs
from node.places import hosted_folder
from node.program import program_of
from node.public_runs import packaged
from node.quantities import parse_rate, parse_size
from node.trainer.device import require_fit
from node.web import listening, serving
from protocol.errors import DataError
from protocol.identity import Identity
from protocol.manifest import load_manifest
from protocol.membership.rendezvous import Rendezvous
from protocol.records import peer_of
from protocol.tasks import end

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 3.0


@dataclass(frozen=True)
class Wish:
    """What the command line asked for; None: not said."""

    run: Path
    folder: Path | None
    http: str
    public_url: str | None
    public: bool
    train: bool
    peers: tuple[str, ...]
    listen: tuple[str, ...]
    name: str
    device: str
    threads: int | None
    memory: str | None
    pause_when_busy: bool
    log_json: bool
    upload: str | None = None
    download: str | None = None
    direct: str = "0"


def host(wish: Wish) -> None:
    """Until Ctrl-C. Raises MurmurError."""
    manifest = load_manifest(wish.run)
    program_of(manifest)  # a method that does not exist must not claim the folder
    door = Door.parse(wish.http, wish.public_url)
    settings = node_settings(
        manifest=manifest,
        base=wish.run.parent.resolve(),
        folder=(wish.folder or hosted_folder(manifest)).resolve(),
        peers=wish.peers,
        listen=wish.listen or (EVERYWHERE_LISTEN,),
        direct=wish.direct,
        name=wish.name,
        device=wish.device,
        threads=wish.threads,
        memory=parse_size(wish.memory, "--memory") if wish.memory else None,
        pause_when_busy=wish.pause_when_busy,
        log_json=wish.log_json,
        upload=parse_rate(wish.upload, "--upload"),
        download=parse_rate(wish.download, "--download"),
    )
    if wish.train:
        require_fit(settings)
    configure_logs(wish.log_json)
    asyncio.run((_train if wish.train else _watch)(settings, door, wish.public))


async def _train(settings: NodeSettings, door: Door, public: bool) -> None:
    """A node like any other, and the page beside it. Where the page fails, the node goes on."""
    folder = RunFolder(settings.folder)

    @asynccontextmanager
    async def beside(node: Assembly) -> AsyncIterator[None]:
        identity = Identity.load_or_create(folder.key)
        window = window_of(node, identity, settings.manifest)
        async with hosting(window, folder, door) as shown:
            if public:
                _advertise(node.rendezvous, window, shown.recorder, door)
            yield

    await run_node(settings, beside)


def _advertise(rendezvous: Rendezvous, window: Window, recorder: Recorder, door: Door) -> None:
    doors = {peer_of(address): (address,) for address in packaged()}
    rendezvous.advertise(lambda now: advertisement(window, recorder.state, door, now), doors)
    logger.info("the run is announced; `murmur runs --peer ADDRESS` shows it")


async def _watch(settings: NodeSettings, door: Door, public: bool) -> None:
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(settled(settings))
        observer = await stack.enter_async_context(watching(settings, folder, version("murmuration")))
        window = observer.window
        shown = await stack.enter_async_context(hosting(window, folder, door))
        metrics = Metrics()
        metrics.add_refusals(observer.refusals)
        status = watching_status(window, shown, metrics)
        port = await stack.enter_async_context(metrics_server(settings.metrics, metrics, status))
        collect_often()
        folder.announce(window.peer_id, await window.transport.addresses(), port)
        if public:
            _advertise(observer.rendezvous, window, shown.recorder, door)
        await _until_told(observer, shown.watch)
        folder.leave_word(status().model_dump_json())


async def _until_told(observer: Observer, watch: asyncio.Task[None]) -> None:
    """Gossip until a signal comes or something ends that never should; then tell the others that we go."""
    stop = asyncio.Event()
    _stop_by_signals(stop)
    forever = (observer.window.directory.run(), observer.rendezvous.run(), give_back_often())
    loops = [asyncio.create_task(loop) for loop in forever]
    stopped = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait({watch, stopped, *loops}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task
    finally:
        await end((stopped, *loops))
        with suppress(TimeoutError):  # whoever could not be told will notice
            async with asyncio.timeout(LEAVE_SECONDS):
                await observer.window.directory.leave()


def _stop_by_signals(stop: asyncio.Event) -> None:
    def signalled() -> None:
        if stop.is_set():
            os._exit(130)  # p2pd dies with us
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, signalled)


def replay(journal: Path, http: str) -> None:
    """Serve an old run until Ctrl-C. Raises MurmurError."""
    recorder = Recorder(None, read_events(journal))
    if recorder.state.facts is None:
        raise DataError(f"{journal} tells of no run; name the events.jsonl of a host")
    configure_logs(False)
    raise_limit()
    asyncio.run(_replay(recorder, Door.parse(http, None)))


async def _replay(recorder: Recorder, door: Door) -> None:
    face = Face(recorder, None, clock=lambda: recorder.state.newest)
    stop = asyncio.Event()
    _stop_by_signals(stop)
    async with serving(application(face), listening(door.host, door.port, "--http"), MAX_CONNECTIONS) as port:
        print(f"page  http://{door.host}:{port}/", flush=True)
        await stop.wait()
