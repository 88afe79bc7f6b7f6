"""Options and limits that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

MAX_SEED = 2**63 - 1  # torch takes no larger one
MAX_COUNT = 2**24
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON on standard output")]
InsecureOption = Annotated[bool, typer.Option("--insecure", help="also accept plain http:// over the internet")]
PeerOption = Annotated[
    list[str] | None,
    typer.Option("--peer", metavar="MULTIADDR", help="of a RUN: connect to it first (repeatable)"),
]
ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="DIR|RUN",
        help="folder of a node or a swarm, a checkpoint, an export; or a RUN of `murmur join`",
    ),
]


def names_run(source: str) -> bool:
    """Return whether a user names a run, whose peers have the model, and not a folder."""
    return "://" in source or Path(source).is_file()
