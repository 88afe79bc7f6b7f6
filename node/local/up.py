"""`murmur up`: a whole swarm on this machine, from a manifest to a model in a folder."""

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from node import places
from node.config import LOOPBACK_LISTEN, Device, threads_each
from node.folder import RunFolder, write_atomically
from node.local.drill import Drill
from node.local.findings import examine
from node.local.local_swarm import Interrupted, LocalSwarm
from node.local.peer_process import PeerProcess
from node.local.report import Outcome, summarise
from node.local.swarm_table import Display
from node.program import program_of
from node.quantities import parse_rate, parse_size
from protocol.manifest import Manifest, load_manifest

USUAL_PEERS = 3


@dataclass(frozen=True)
class Wish:
    """What the command line asked for; None: not said."""

    run: Path | None = None
    folder: Path | None = None
    peers: int | None = None
    rounds: int | None = None
    recipe: str | None = None
    seed: int | None = None
    drill: bool | None = None
    device: Device = "auto"
    json: bool = False
    threads: int | None = None
    memory: str | None = None
    pause_when_busy: bool = False
    upload: str | None = None
    download: str | None = None


@dataclass(frozen=True)
class Plan:
    """What will be done, after every default."""

    manifest: Manifest
    folder: Path
    peers: int
    drill: bool
    device: Device
    json: bool
    guest: tuple[str, ...] = ()  # options of `murmur join` that spare this machine


def up(wish: Wish) -> int:
    """Runs the swarm to its target, prints the report and returns the exit code. Raises MurmurError."""
    plan = settle(wish)
    program_of(plan.manifest)  # a method that does not exist must not claim the folder
    with RunFolder(plan.folder).claimed(plan.manifest):
        return _train(plan)


def settle(wish: Wish) -> Plan:
    """A folder that was used before goes on with its own manifest, unless another is named."""
    kept = wish.folder / "run.toml" if wish.folder else None
    resumed = wish.run is None and kept is not None and kept.exists()
    source = kept if resumed and kept else wish.run or places.demo_manifest()
    given = load_manifest(source)
    peers = wish.peers or (given.run.min_peers if resumed else max(USUAL_PEERS, given.run.min_peers))
    return Plan(
        manifest=swarm_manifest(given, source.parent.resolve(), peers, wish),
        folder=wish.folder or places.fresh_swarm(given.run.name),
        peers=peers,
        drill=(wish.run is None and not resumed) if wish.drill is None else wish.drill,
        device=wish.device,
        json=wish.json,
        guest=_guest_options(wish, peers),
    )


def _guest_options(wish: Wish, peers: int) -> tuple[str, ...]:
    words = ["--threads", str(wish.threads or threads_each(peers))]
    if wish.memory is not None:
        parse_size(wish.memory, "--memory")
        words += ["--memory", wish.memory]
    for option, limit in (("--upload", wish.upload), ("--download", wish.download)):
        if limit is not None:
            parse_rate(limit, option)
            words += [option, limit]
    return (*words, *(["--pause-when-busy"] if wish.pause_when_busy else []))


def _train(plan: Plan) -> int:
    with Display(Console(stderr=plan.json, highlight=False), plain=plan.json) as display:
        name, recipe = plan.manifest.run.name, plan.manifest.method.recipe
        display.say(f"{name}: {plan.peers} peers in {plan.folder}, recipe {recipe}")
        drill = Drill(plan.peers) if plan.drill else None
        try:
            outcome = asyncio.run(LocalSwarm(plan.manifest, peer_processes(plan), display, drill).run())
        except Interrupted:
            display.say(f"left; murmur up --dir {plan.folder} goes on from here")
            return 130
        display.say("all peers have reached the target; measuring and exporting the model")
    return _conclude(plan, outcome)


def _conclude(plan: Plan, outcome: Outcome) -> int:
    report = summarise(plan.manifest, outcome, examine(plan.manifest, plan.folder))
    write_atomically(plan.folder / "report.json", report.model_dump_json(indent=2).encode())
    if plan.json:
        sys.stdout.write(report.model_dump_json() + "\n")
    else:
        sys.stdout.write("\n".join(report.lines()) + "\n")
    return 0 if report.agreed else 1


def swarm_manifest(manifest: Manifest, base: Path, peers: int, wish: Wish) -> Manifest:
    """The manifest with the command line's changes, and with data paths that hold from any folder."""
    values: dict[str, Any] = manifest.model_dump(mode="json", exclude_none=True)
    values["run"] |= {"min_peers": peers, "bootstrap": []}
    if wish.seed is not None:
        values["run"]["seed"] = wish.seed
    if wish.rounds is not None:
        values["target"] = {"rounds": wish.rounds}
    if wish.recipe is not None and wish.recipe != manifest.method.recipe:
        values["method"] = {"recipe": wish.recipe}  # the other recipe's parts have other options
        if wish.rounds is None and manifest.target.rounds is not None:
            values["target"] = {"tokens": tokens_in(manifest, manifest.target.rounds, peers)}
    data = values["data"]
    if data["tokenizer"]:
        data["tokenizer"] = str(base / data["tokenizer"])
    # The name of a data set on the hub is no path, unless a folder of that name is there.
    if data["path"] and (data["source"] != "hf" or (base / data["path"]).exists()):
        data["path"] = str(base / data["path"])
    return Manifest.model_validate_json(json.dumps(values))


def tokens_in(manifest: Manifest, rounds: int, peers: int) -> int:
    """What so many rounds of the manifest's own method train on."""
    return program_of(manifest).steps_before(rounds) * manifest.train.batch_tokens * peers


def peer_processes(plan: Plan) -> list[PeerProcess]:
    found = []
    for index in range(plan.peers):
        home = places.peer_folder(plan.folder, index)
        command = [sys.executable, "-m", "node.cli", "join", str(plan.folder / "run.toml"), "--dir", str(home)]
        command += ["--name", home.name, *plan.guest, "--device", plan.device, "--listen", LOOPBACK_LISTEN]
        found.append(PeerProcess(home.name, home, command))
    return found
