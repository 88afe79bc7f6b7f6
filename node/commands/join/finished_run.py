"""Find out whether a run is over, and report its end to the user of `murmur join`.

A temporary node with its own key and folder asks the peers. `murmur join` starts it when the text for training is
missing, because somebody who comes too late should not have to look for it.
"""

import asyncio
import shlex
import tempfile
import time
from pathlib import Path

from node.commands.join.http_download import is_served
from node.daemon.lifecycle import FinishedRun
from node.daemon.node import Node
from node.daemon.peers.swarm_view import find_newest_validation, states_at
from node.daemon.receipts.commit_file import COMMIT_FILE_NAME
from node.daemon.receipts.ledger import commit_reader, read_ledger
from node.daemon.receipts.receipt import describe_account
from node.dashboard.observer_node import gossiping, open_observer_node
from node.loop.peers.swarm_snapshot import SwarmSnapshot
from node.loop.steering import Steering
from node.options import NodeOptions
from node.paths import find_newest_model, read_peer_id
from node.run_dir import RunDir
from protocol.consensus.chain import Chain
from protocol.errors import ReceiptError

PAGE_SECONDS = 5.0
MANIFEST_PATH = "/run.toml"
LOOK_SECONDS = 15.0
POLL_SECONDS = 0.2


def describe_end(finished: FinishedRun, run: str, node_dir: Path) -> list[str]:
    """Return the last lines of `murmur join RUN` for a run that has reached its target."""
    loss = "" if finished.validation_loss is None else f", validation loss {finished.validation_loss:.3f}"
    if loss and finished.validation_round not in (None, finished.round):
        loss += f" after round {finished.validation_round:,}"
    url = find_on_host(run, "/model")
    newest = find_newest_model([node_dir])  # the node of a pipeline has its own stage, and one that it keeps
    has_whole = finished.is_ours and newest is not None and newest[0] == finished.round
    source = shlex.quote(str(node_dir) if has_whole else run)
    return [
        f"the run is over: round {finished.round:,}, {finished.tokens:,} tokens{loss}",
        *([f"model: {url}"] if url else []),
        f"to get the model as a folder: murmur export {source} OUT",
        *describe_own_part(run, node_dir),
    ]


def describe_own_part(run: str, node_dir: Path) -> list[str]:
    """Return the lines about the work of this node that the run counts; none without any."""
    peer, commits = read_peer_id(node_dir), node_dir / COMMIT_FILE_NAME
    if peer is None or not commits.exists():
        return []
    try:
        ledger = read_ledger(commits, commit_reader)
    except ReceiptError as error:
        return [f"your part is not known: {error}"]
    if (account := ledger.accounts.get(peer)) is None:
        return []
    url = find_on_host(run, f"/receipts/{peer}.json")
    return [
        f"your part: {describe_account(account, ledger.head.tokens)}; thank you",
        f"your receipt: {url or f'murmur receipt {shlex.quote(str(node_dir))} {peer}'}",
    ]


def find_on_host(run: str, path: str) -> str | None:
    """Return the URL of a file on the host that `run` is a URL of; None if there is none."""
    if not run.startswith(("http://", "https://")) or not run.endswith(MANIFEST_PATH):
        return None
    url = f"{run.removesuffix(MANIFEST_PATH)}{path}"
    return url if is_served(url, PAGE_SECONDS) else None


async def find_end(settings: NodeOptions) -> FinishedRun | None:
    """Return the end of the run if most of its peers report it; None if it goes on, or nobody answers."""
    if not settings.contacts:
        return None
    with tempfile.TemporaryDirectory(prefix="murmur-") as folder:
        options = settings.model_copy(update={"folder": Path(folder)})
        async with open_observer_node(options, RunDir(options.folder), keeps=False) as (node, _), gossiping(node):
            return await _look(node)


async def _look(node: Node) -> FinishedRun | None:
    manifest = node.options.manifest
    stage = 0 if manifest.pipeline.is_cut else None  # the stages of a pipeline end together
    steering = Steering(manifest, Chain.from_genesis(manifest.run_id), node.revisions.log)
    began = time.monotonic()
    while time.monotonic() - began < LOOK_SECONDS:
        records = node.admitted.records()
        snapshot = SwarmSnapshot(states_at(records, stage))
        final = steering.final_head(snapshot, node.peer_id)
        if final is not None:
            newest = find_newest_validation(records.values(), final.round)
            loss, measured = (newest.validation_loss, newest.validation_round) if newest else (None, None)
            return FinishedRun(final.round, final.tokens, loss, is_ours=False, validation_round=measured)
        if snapshot.trainers and steering.knows_all(snapshot):
            return None
        await asyncio.sleep(POLL_SECONDS)
    return None
