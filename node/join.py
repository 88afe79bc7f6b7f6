"""`murmur join`: one node of a run, in this process."""

import asyncio
from pathlib import Path

from node.config import EVERYWHERE_LISTEN, node_settings
from node.daemon.lifecycle import run_node
from node.logs import configure_logs
from node.places import joined_folder
from protocol.manifest import load_manifest


def join_run(
    run: Path,
    folder: Path | None,
    peers: tuple[str, ...],
    device: str,
    name: str,
    threads: int | None,
    listen: tuple[str, ...],
    metrics_port: int,
    log_json: bool,
) -> None:
    """Until the run's target or Ctrl-C. Raises MurmurError."""
    manifest = load_manifest(run)
    settings = node_settings(
        manifest=manifest,
        base=run.parent.resolve(),
        folder=(folder or joined_folder(manifest)).resolve(),
        peers=peers,
        device=device,
        name=name,
        threads=threads,
        listen=listen or (EVERYWHERE_LISTEN,),
        metrics_port=metrics_port,
        log_json=log_json,
    )
    configure_logs(log_json)
    asyncio.run(run_node(settings))
