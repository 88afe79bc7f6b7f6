"""`murmur up`: run a whole swarm on this machine, from a manifest to an exported model."""

import asyncio
import contextlib
import logging
import os
import shutil
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from node import paths
from node.commands.capacity import estimate_peer, measure_flops
from node.commands.doctor.checks import free_memory
from node.commands.up.local_swarm import Interrupted, KillTest, LocalSwarm
from node.commands.up.peer_process import PeerProcess
from node.commands.up.report import SwarmResult, build_report, count_contributors, evaluate_model, validation_losses
from node.commands.up.swarm_summary import SwarmDisplay
from node.dashboard.command import ObserverStatus
from node.dashboard.event_log import EVENT_FILE_NAME
from node.dashboard.observer_node import gossiping, node_handle, open_observer_node
from node.dashboard.run_report import write_report
from node.dashboard.service import DashboardAddress, RunningDashboard, serve_dashboard
from node.data.check import TextReport, check_text
from node.flags import MachineFlags, NodeFlags, to_arguments
from node.from_manifest import build_node_program, build_program, in_memory_mode, require_program
from node.model.weight_files import start_weights
from node.monitoring.logs import PlainFormatter
from node.monitoring.metrics import serve_metrics
from node.options import (
    LISTEN_ON_LOOPBACK,
    MachineOptions,
    NodeOptions,
    parse_node_options,
    parse_options,
    threads_per_process,
)
from node.own_loops import require_our_loop
from node.own_modules import own_registry, with_modules
from node.paths import registered
from node.processes.process import raise_fd_limit
from node.run_dir import RunDir
from node.run_file import load_run_file
from node.trainer.devices.device import choose_devices, require_usable_device
from node.variants import read_variant
from protocol.errors import UsageError
from protocol.manifest.model import HUB_SCHEME
from protocol.manifest.reading import manifest_of_values
from protocol.manifest.run import Manifest

LOG_FILE = "log"
DEFAULT_PEERS = 3
PAGE_FOLDER = "page"


@dataclass(frozen=True)
class SwarmPage:
    """The dashboard, and the addresses at which the peers find its node."""

    dashboard: RunningDashboard
    entry_points: tuple[str, ...]


@contextlib.asynccontextmanager
async def serve_swarm_page(
    manifest: Manifest, folder: Path, address: DashboardAddress, model_folders: Sequence[Path]
) -> AsyncIterator[SwarmPage]:
    """Serve the page inside the context; samples are of the newest model in the peers' folders, or in that above them.

    `folder` keeps the node's key and the event log. Raises MurmurError.
    """
    raise_fd_limit()
    settings = observer_options(manifest, folder)
    with RunDir(folder).lock(manifest) as run_dir, _logging_to(folder / LOG_FILE):
        async with open_observer_node(settings, run_dir, keeps=False) as (observer, _):
            handle = node_handle(observer)
            async with serve_dashboard(handle, run_dir, address, model_folders) as dashboard, gossiping(observer):
                status = ObserverStatus(handle, dashboard, observer.metrics)
                async with serve_metrics(settings.metrics, observer.metrics, status) as port:
                    addresses = tuple(await handle.transport.addresses())
                    run_dir.write_node_info(handle.peer_id, addresses, port)
                    with registered(folder):
                        yield SwarmPage(dashboard, addresses[:1])
                run_dir.write_final_status(status.status().model_dump_json())


def observer_options(manifest: Manifest, folder: Path) -> NodeOptions:
    """Return the options of the observing node: only peers on this machine can reach it."""
    flags = NodeFlags(name="page", listen=[LISTEN_ON_LOOPBACK], direct="off")
    return parse_node_options(flags, manifest=manifest, base=folder.parent.resolve(), folder=folder.resolve())


@contextlib.contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Write log lines of this process to a file, because the terminal shows the table of the swarm."""
    handler, root = logging.FileHandler(path), logging.getLogger()
    handler.setFormatter(PlainFormatter())
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """The command line of `murmur up`. `None` means not given."""

    run: Path | None = None
    folder: Path | None = None
    peers: int | None = None
    rounds: int | None = None
    recipe: str | None = None
    seed: int | None = None
    drill: bool | None = None
    json: bool = False
    http: str | None = None
    dry_run: bool = False
    imports: tuple[str, ...] = ()
    flags: MachineFlags = MachineFlags()


@dataclass(frozen=True)
class SwarmConfig:
    """A swarm to run, with all defaults filled in; `flags` are those of each peer."""

    manifest: Manifest
    folder: Path
    peers: int
    drill: bool
    json: bool
    flags: MachineFlags
    page: DashboardAddress | None = None


def up(options: UpOptions) -> int:
    """Run the swarm to its target and print the report; returns the exit code. Raises MurmurError."""
    config = resolve_options(options)
    mode = parse_options(MachineOptions, config.flags).memory_mode
    build_node_program(config.manifest, mode)  # an unknown method must fail before the folder is locked
    texts = check_text(config.manifest, config.folder)  # before a folder is made for a run without text
    if options.dry_run:
        return _predict_needs(config)
    _require_usable_device(config)
    with RunDir(config.folder).lock(config.manifest) as folder:
        folder.copy_tokenizer(config.manifest, config.folder)
        return _run_swarm(config, texts)


def _require_usable_device(config: SwarmConfig) -> None:
    """Raise DeviceError if no peer could train so on this machine, before one of them starts."""
    options = parse_options(MachineOptions, config.flags)
    require_usable_device(
        NodeOptions(manifest=config.manifest, base=config.folder, folder=config.folder, **options.model_dump())
    )


def _predict_needs(config: SwarmConfig) -> int:
    """Print what the swarm takes of this machine; raises DeviceError if it does not fit."""
    options = parse_options(MachineOptions, config.flags)
    manifest, devices = in_memory_mode(config.manifest, options.memory_mode), choose_devices(options)
    device, ranks, free = devices[0], len(devices), free_memory()
    free_device = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free / config.peers / ranks
    flops = measure_flops(device) / (1 if device.type == "cuda" else ranks)  # ranks on a CPU share its cores
    prediction = estimate_peer(manifest, device.type, free_device, flops, options.recompute, ranks)
    sys.stdout.write("".join(f"{line}\n" for line in prediction.lines(config.peers, free)))
    prediction.require_memory(config.peers, free)
    return 0


def resolve_options(options: UpOptions) -> SwarmConfig:
    """Fill in all defaults; a folder that was used before resumes with its own manifest unless another is named."""
    saved = options.folder / "run.toml" if options.folder else None
    resumed = options.run is None and saved is not None and saved.exists()
    source = saved if resumed and saved else options.run or paths.demo_manifest()
    if not paths.is_utf8(source.resolve()):  # the manifest of the peers names it
        raise UsageError(f"the path {ascii(str(source.resolve()))} is not UTF-8 text; use another folder")
    signed = load_run_file(source)
    manifest = with_modules(signed.manifest, options.imports)
    if options.recipe is None:
        require_program(manifest, signed.text)  # a fault in the file is reported with its line
    require_our_loop(manifest)
    parse_options(MachineOptions, options.flags)  # report a mistake before a peer starts
    peers = options.peers or (manifest.run.min_peers if resumed else max(DEFAULT_PEERS, manifest.run.min_peers))
    return SwarmConfig(
        manifest=adapt_manifest(manifest, source.parent.resolve(), peers, options),
        folder=options.folder or paths.next_swarm_dir(manifest.run.name),
        peers=peers,
        drill=(options.run is None and not resumed) if options.drill is None else options.drill,
        json=options.json,
        page=DashboardAddress.parse(options.http, None) if options.http else None,
        flags=replace(options.flags, threads=options.flags.threads or threads_per_process(peers)),
    )


def _run_swarm(config: SwarmConfig, texts: Sequence[TextReport]) -> int:
    with SwarmDisplay(Console(stderr=config.json, highlight=False), plain=config.json) as display:
        name, recipe = config.manifest.run.name, config.manifest.method.recipe
        display.print_line(f"{name}: {config.peers} peers in {config.folder}, recipe {recipe}")
        for text in texts:
            for line in (text.describe(), *text.skipped):
                display.print_line(f"data: {line}")
        if line := describe_start(config.manifest, config.folder):
            display.print_line(line)
        kill_test = KillTest(config.peers) if config.drill else None
        try:
            result = asyncio.run(_run_peers(config, display, kill_test))
        except Interrupted:
            display.print_line(f"stopped; `{_own_command()} up --dir {config.folder}` resumes the run")
            return 130
        display.print_line("all peers have reached the target; evaluating and exporting the model")
    return _report_result(config, result)


def _own_command() -> str:
    """Return the name of this program as the user can type it: with its path where a shell does not find it."""
    is_script = Path(sys.argv[0]).name == "murmur" and shutil.which("murmur") is None
    return os.path.relpath(sys.argv[0]) if is_script else "murmur"


async def _run_peers(config: SwarmConfig, display: SwarmDisplay, kill_test: KillTest | None) -> SwarmResult:
    """Run the peers to the target, with the page if one is wanted."""
    peers = build_peer_processes(config)
    if config.page is None:
        return await LocalSwarm(config.manifest, peers, display, kill_test).run()
    folder, is_cut = config.folder / PAGE_FOLDER, config.manifest.pipeline.is_cut
    models = [config.folder] if is_cut else [peer.folder for peer in peers]  # no peer of a pipeline has a whole one
    async with serve_swarm_page(config.manifest, folder, config.page, models) as page:
        display.print_line(f"page: {page.dashboard.page_url}")
        result = await LocalSwarm(config.manifest, peers, display, kill_test, page.entry_points).run()
        display.print_line("writing the last sample for the page")
        await page.dashboard.sampler.sample_now()
    display.print_line(f"the page has ended; `murmur replay {folder / EVENT_FILE_NAME}` shows it again")
    return result


def _report_result(config: SwarmConfig, result: SwarmResult) -> int:
    node_dirs = [paths.peer_dir(config.folder, index) for index in range(config.peers)]
    contributors = count_contributors(node_dirs, result)
    report = build_report(config.manifest, result, evaluate_model(config.manifest, config.folder), contributors)
    write_report(config.folder, report)
    if config.json:
        sys.stdout.write(report.model_dump_json() + "\n")
    else:
        sys.stdout.write("\n".join(report.lines()) + "\n")
    return 0 if report.agreed else 1


def adapt_manifest(manifest: Manifest, base: Path, peers: int, options: UpOptions) -> Manifest:
    """Return the manifest with the command line's changes and with absolute data paths."""
    values: dict[str, Any] = manifest.model_dump(mode="json", exclude_none=True)
    stages = manifest.pipeline.stages
    if peers < stages:
        raise UsageError(f"--peers: this run has {stages} stages, and each needs a peer; write at least {stages}")
    values["run"] |= {"min_peers": peers, "bootstrap": []}
    if options.seed is not None:
        values["run"]["seed"] = options.seed
    if options.rounds is not None:
        values["target"] = {"rounds": options.rounds}
    if options.recipe is not None and options.recipe != manifest.method.recipe:
        modules = manifest.method.modules
        variant = read_variant(options.recipe, own_registry(modules))  # the other recipe's parts have other options
        values["method"] = {"recipe": variant.recipe, "modules": list(modules), **variant.tables}
        if options.rounds is None and manifest.target.rounds is not None:
            values["target"] = {"tokens": tokens_in_rounds(manifest, manifest.target.rounds, peers)}
    values.pop("admission", None)  # the peers of this machine need neither tickets nor a list
    values["target"]["keepers"] = 0  # all peers keep the model in the same folder
    data = values["data"]
    if data["tokenizer"]:
        data["tokenizer"] = str(base / data["tokenizer"])
    for table in data["sources"] or [data]:
        # The name of a data set on the hub is not a path, unless a folder of that name exists.
        if table["path"] and (table["source"] != "hf" or (base / table["path"]).exists()):
            table["path"] = str(base / table["path"])
    source = values["model"]["from"]
    if source and not source.startswith(HUB_SCHEME):
        values["model"]["from"] = str(base / Path(source).expanduser())
    return manifest_of_values(values, f"{base} with the options of this command")


def describe_start(manifest: Manifest, folder: Path) -> str:
    """Return the validation loss of the weights that a new swarm starts from; empty if it starts from noise."""
    if not manifest.model.from_ or any(folder.glob("peer-*/checkpoints/*")):
        return ""
    weights = start_weights(manifest, folder)
    assert weights is not None
    (loss,) = validation_losses(manifest, folder, weights)
    return f"start: validation loss {loss:.4f} nats per token, of the weights in {manifest.model.from_}"


def tokens_in_rounds(manifest: Manifest, rounds: int, peers: int) -> int:
    """Return the number of tokens that `rounds` rounds of the manifest's own method train on."""
    return build_program(manifest).steps_before(rounds) * manifest.train.batch_tokens * peers


def build_peer_processes(config: SwarmConfig) -> list[PeerProcess]:
    """Return the swarm's peers, not started yet."""
    processes = []
    for index in range(config.peers):
        node_dir = paths.peer_dir(config.folder, index)
        command = [sys.executable, "-P", "-m", "node.cli", "join", str(config.folder / "run.toml")]
        command += ["--dir", str(node_dir)]
        if config.manifest.pipeline.is_cut:
            command += ["--stage", str(index % config.manifest.pipeline.stages)]
        command += ["--name", node_dir.name, *to_arguments(config.flags), "--listen", LISTEN_ON_LOOPBACK]
        processes.append(PeerProcess(node_dir.name, node_dir, command))
    return processes
