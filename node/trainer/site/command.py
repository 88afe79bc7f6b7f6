"""`murmur rank`: the devices of this machine become ranks of another machine's node."""

import asyncio
import logging
from dataclasses import dataclass

import torch

from node.flags import MachineFlags
from node.monitoring.logs import configure_logs
from node.options import NodeOptions, TrainerOptions, parse_options
from node.processes.process import handle_stop_signals, raise_fd_limit
from node.run_dir import RunDir
from node.trainer.devices.device import choose_devices, device_name
from node.trainer.site.agent import SiteAgent, SiteMember
from node.trainer.site.messages import own_version
from node.trainer.site.token import SiteToken, load_site_key
from node.units import ALL_INTERFACES, parse_host_port
from protocol.errors import UsageError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankOptions:
    """The command line, as typed."""

    address: str
    token: str
    device: str
    devices: str | None
    threads: int | None


def serve_site(options: RankOptions) -> None:
    """Train until the first machine or Ctrl-C ends it. Raises MurmurError."""
    member = _member_of(options)
    raise_fd_limit()
    with configure_logs(as_json=False, verbose=False) as display:
        asyncio.run(_run_until_stopped(SiteAgent(member)))
        display.close()


async def _run_until_stopped(agent: SiteAgent) -> None:
    stopped = asyncio.Event()
    handle_stop_signals(asyncio.get_running_loop(), stopped.set)
    work, stop = asyncio.create_task(agent.run()), asyncio.create_task(stopped.wait())
    await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if work.done():
        work.result()
        logger.info("the first machine has ended the training")
        return
    work.cancel()
    await asyncio.wait((work,))


def _member_of(options: RankOptions) -> SiteMember:
    host, port = parse_host_port(options.address, "HOST:PORT")
    if not options.token:
        raise UsageError("--token is missing; copy the line that the first machine prints")
    flags = MachineFlags(device=options.device, devices=options.devices, threads=options.threads)
    checked = parse_options(TrainerOptions, flags)
    devices = choose_devices(checked)
    return SiteMember(
        host=host,
        port=port,
        token=SiteToken.parse(options.token),
        devices=tuple(map(str, devices)),
        names=tuple(map(device_name, devices)),
        version=own_version(torch.__version__),
        threads=max(1, checked.thread_count // len(devices)),
    )


def describe_site(settings: NodeOptions, run_dir: RunDir) -> str:
    """Return the line that a person types on the other machines of this node's site."""
    assert settings.site is not None
    host, port = parse_host_port(settings.site, "--site")
    shown = "THIS-MACHINE" if host in ALL_INTERFACES else f"[{host}]" if ":" in host else host
    return f"murmur rank {shown}:{port} --token {SiteToken.of(load_site_key(run_dir.site_key))}"
