"""Tell the user of `murmur join` that the run is over, where its model is, and what this node gave."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from node.commands.join.http_download import is_served
from node.daemon.receipts.commit_file import COMMIT_FILE_NAME
from node.daemon.receipts.ledger import commit_reader, read_ledger
from node.paths import find_newest_model, read_peer_id
from node.units import format_plural
from protocol.errors import ReceiptError

if TYPE_CHECKING:
    from node.daemon.lifecycle import FinishedRun

PAGE_SECONDS = 5.0
MANIFEST_PATH = "/run.toml"


def describe_end(finished: "FinishedRun", run: str, node_dir: Path) -> list[str]:
    """Return the last lines of `murmur join RUN` for a run that has reached its target."""
    validation = finished.validation_loss
    loss = "" if validation is None else f", validation loss {validation:.3f}"
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
    share = account.tokens / max(1, ledger.head.tokens)
    return [
        f"your part: {account.tokens:,} tokens in {format_plural(account.rounds, 'round')} ({share:.1%}); thank you",
        f"your receipt: {url or f'murmur receipt {shlex.quote(str(node_dir))} {peer}'}",
    ]


def find_on_host(run: str, path: str) -> str | None:
    """Return the URL of a file on the host that `run` is a URL of; None if there is none."""
    if not run.startswith(("http://", "https://")) or not run.endswith(MANIFEST_PATH):
        return None
    url = f"{run.removesuffix(MANIFEST_PATH)}{path}"
    return url if is_served(url, PAGE_SECONDS) else None
