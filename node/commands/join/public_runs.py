"""`murmur runs`: look up the public runs that hosts have announced, at any peers of the network.

The command asks the named peers first, then the packaged list, then peers known from runs joined on this machine.
"""

import asyncio
import json
import logging
import random
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from node.paths import bootstrap_file, joined_dirs
from node.run_dir import RunDir
from node.units import format_count
from protocol.errors import MalformedError, PeerFault, UnreachableError, UsageError
from protocol.identity import PeerId
from protocol.membership.clock import SwarmClock
from protocol.membership.contacts import load_addresses
from protocol.membership.dht import DhtNode
from protocol.membership.peer_table import CLOCK_TOLERANCE_SECONDS
from protocol.membership.rendezvous import PUBLIC_RUNS_TOPIC, parse_public_run, require_current
from protocol.murmur_pb2 import PublicRun
from protocol.signing import fingerprint, peer_id_of
from protocol.transport.transport import Transport

logger = logging.getLogger(__name__)

MAX_QUERIED_PEERS = 16
SEARCH_SECONDS = 30.0
AnnouncedRuns = dict[tuple[PeerId, bytes], PublicRun]  # by host and run


def show_runs(peers: Sequence[str], as_json: bool) -> None:
    """Print the public runs.

    Raises UsageError if no peer to ask is known, UnreachableError if none of them answers.
    """
    runs, answered = asyncio.run(search_runs(peers_to_query(peers)))
    rows = [describe_run(host, run) for (host, _), run in sorted(runs.items(), key=lambda entry: entry[1].name)]
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
    elif rows:
        Console(highlight=False).print(_build_table(rows))
        for row in rows:
            print(f"murmur join {row['link']}")  # on its own line, for copying
    else:
        print(f"the {answered} peers that answer know no public run; `murmur host --public` announces one")


def peers_to_query(named: Sequence[str]) -> dict[PeerId, tuple[str, ...]]:
    """Return at most MAX_QUERIED_PEERS peers to ask, with their addresses. Raises UsageError if there are none."""
    chosen: dict[PeerId, tuple[str, ...]] = {}
    for address in (*named, *packaged_peers()):
        try:
            chosen[peer_id_of(address)] = (*chosen.get(peer_id_of(address), ()), address)
        except MalformedError as error:
            raise UsageError(f"--peer: {error}; write it like /ip4/203.0.113.7/tcp/4001/p2p/12D3...") from error
    known = [entry for folder in joined_dirs() for entry in load_addresses(RunDir(folder).peers).items()]
    random.shuffle(known)
    for peer, addresses in known:
        chosen.setdefault(peer, addresses)
    if not chosen:
        raise UsageError(
            "no peer to ask: --peer is not given, no run was joined on this machine, and the packaged list of public "
            "peers is empty; name any peer of the network with --peer"
        )
    return dict(list(chosen.items())[:MAX_QUERIED_PEERS])


def packaged_peers() -> tuple[str, ...]:
    """Return the addresses of the public peers that come with the package."""
    return tuple(tomllib.loads(bootstrap_file().read_text(encoding="utf-8"))["peers"])


async def search_runs(peers: dict[PeerId, tuple[str, ...]]) -> tuple[AnnouncedRuns, int]:
    """Return the announced runs and the number of peers that answered."""
    clock, runs = SwarmClock(), AnnouncedRuns()
    with tempfile.TemporaryDirectory(prefix="murmur-") as folder:
        transport = await Transport.start(Path(folder) / "key", Path(folder), [])
        dht = DhtNode(transport, clock, (PUBLIC_RUNS_TOPIC,), client_mode=True)
        try:
            async with asyncio.timeout(SEARCH_SECONDS):
                await dht.open()
                answers = await asyncio.gather(*(dht.ping_peer(peer, addresses) for peer, addresses in peers.items()))
                if not any(answers):
                    raise UnreachableError(f"none of {len(peers)} peers answers; name another with --peer")
                await dht.announce_and_lookup(
                    PUBLIC_RUNS_TOPIC, None, lambda value: add_announcement(runs, value, clock.now())
                )
        except TimeoutError as error:
            raise UnreachableError(f"no answer within {SEARCH_SECONDS:.0f} s; try again") from error
        finally:
            await dht.close()
            await transport.stop()
    return runs, sum(answers)


def add_announcement(runs: AnnouncedRuns, value: bytes, now: float) -> None:
    """Keep the newest announcement of each host and run; log and drop an invalid or expired one."""
    try:
        host, run = parse_public_run(value)
        require_current(run, now, CLOCK_TOLERANCE_SECONDS)
    except PeerFault as fault:
        logger.warning("dropped the announcement of a public run: %s", fault)
        return
    known = runs.get((host, run.run))
    if known is None or run.expires > known.expires:
        runs[host, run.run] = run


def describe_run(host: PeerId, run: PublicRun) -> dict[str, Any]:
    """Return the fields of the run for the table and for --json; the host's key where no organiser vouches for it."""
    organiser = run.organiser or host
    return {
        "name": run.name,
        "run_id": run.run.hex(),
        "parameters": run.parameters,
        "recipe": run.recipe,
        "peers": run.peers,
        "round": run.round,
        "target_rounds": run.target_rounds or None,
        "tokens": run.tokens,
        "target_tokens": run.target_tokens or None,
        "organiser": organiser,
        "fingerprint": fingerprint(organiser),
        "link": run.link,
    }


def format_progress(row: dict[str, Any]) -> str:
    """Return the progress towards the target, such as `round 3 of 10`."""
    if row["target_rounds"]:
        return f"round {row['round']} of {row['target_rounds']}"
    if row["target_tokens"]:
        return f"{format_count(row['tokens'])} of {format_count(row['target_tokens'])} tokens"
    return f"round {row['round']}"


def _build_table(rows: Iterable[dict[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for name in ("run", "model", "method", "peers", "progress", "organiser"):
        table.add_column(name, overflow="fold")
    for row in rows:
        cells = (row["name"], format_count(row["parameters"]), row["recipe"], str(row["peers"]), format_progress(row))
        table.add_row(*map(Text, (*cells, row["fingerprint"])))
    return table
