"""Tell the user of `murmur join` that the run is over, and where its model is."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2

if TYPE_CHECKING:
    from node.daemon.lifecycle import FinishedRun

PAGE_SECONDS = 5.0
MANIFEST_PATH = "/run.toml"


def describe_end(finished: "FinishedRun", run: str, node_dir: Path) -> list[str]:
    """Return the last lines of `murmur join RUN` for a run that has reached its target."""
    validation = finished.validation_loss
    loss = "" if validation is None else f", validation loss {validation:.3f}"
    url = find_model_url(run)
    source = shlex.quote(str(node_dir) if finished.is_ours else run)
    return [
        f"the run is over: round {finished.round:,}, {finished.tokens:,} tokens{loss}",
        *([f"model: {url}"] if url else []),
        f"to get the model as a folder: murmur export {source} OUT",
    ]


def find_model_url(run: str) -> str | None:
    """Return the URL of the model on the host that `run` is a URL of; None if there is none."""
    if not run.startswith(("http://", "https://")) or not run.endswith(MANIFEST_PATH):
        return None
    url = f"{run.removesuffix(MANIFEST_PATH)}/model"
    try:
        return url if httpx2.head(url, timeout=PAGE_SECONDS).status_code == 200 else None
    except (httpx2.HTTPError, httpx2.InvalidURL):
        return None
