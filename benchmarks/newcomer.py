"""How long it takes a newcomer to contribute: from the line that is copied from a run's page to a round that took it.

    python benchmarks/newcomer.py [RUN.toml] [--peers 3] [--keep SECONDS] [--json]
    python benchmarks/newcomer.py --life [--record docs/results/newcomer.md]

A host (which only watches) opens the run on this machine, the first peers join by its link and train; then the line on
the page is run with a home folder that is empty. Prints what the newcomer reads, and the seconds until each step; the
program and torch are installed already. Takes a minute or two on two cores; --keep lets all go on for so long, for who
wants to look at the page. Exit code 1 where the newcomer does not contribute within 60 seconds.
"""

import argparse
import asyncio
import contextlib
import html
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx2

from benchmarks.people import Person, find_page, stop_all, wait_for
from benchmarks.whole_life import play
from node.monitoring.status import NodeStatus, fetch_status
from node.paths import demo_manifest
from protocol.errors import UnreachableError

LIMIT = 60.0  # seconds
ROUNDS = 2  # that the first peers have made before the newcomer comes
JOIN = re.compile(r'<code id="join">(.*?)</code>')


def read_status(person: Person) -> NodeStatus | None:
    """Return the status of the person's node; None if it does not answer yet."""
    for announced in (person.home / ".local/state/murmur").glob("**/node.json"):
        with contextlib.suppress(UnreachableError, OSError, ValueError, KeyError):
            return asyncio.run(fetch_status(json.loads(announced.read_bytes())["metrics_port"], 2.0))
    return None


def contributes(person: Person) -> bool:
    status = read_status(person)
    return status is not None and status.contributions_included > 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, nargs="?", default=demo_manifest())
    parser.add_argument("--peers", type=int, default=3, help="that are there before")
    parser.add_argument("--keep", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--life", action="store_true", help="play the whole life of a run (benchmarks/whole_life.py)")
    parser.add_argument("--record", type=Path, help="write every printed line of --life to this file")
    options = parser.parse_args()
    if options.life:
        with tempfile.TemporaryDirectory() as folder:
            figures = play(Path(folder), options.record)
        print(json.dumps(figures) if options.json else "\n".join(f"{name}: {value}" for name, value in figures.items()))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        steps = newcomer(Path(folder), options.run.resolve(), options.peers, options.keep)
    lines = (f"{name:>14} {seconds:6.1f} s" for name, seconds in steps.items())
    print(json.dumps(steps) if options.json else "\n".join(lines))
    return int(steps["contributing"] > LIMIT)


def newcomer(folder: Path, run: Path, peers: int, keep: float) -> dict[str, float]:
    """Return the seconds from the newcomer's command to each step."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        host = Person("host", folder / "host")
        running.append(host.start("host", str(run), "--http", "127.0.0.1:0"))
        page = find_page(host)
        print(f"page {page}/", file=sys.stderr, flush=True)
        for number in range(peers):
            peer = Person(f"peer-{number}", folder / f"peer-{number}")
            running.append(peer.start("join", f"{page}/run.toml", "--threads", "1", "--name", peer.name))
        url = f"{page}/api/v1/state"
        wait_for(lambda: int(httpx2.get(url, timeout=5).json()["round"]) >= ROUNDS, "rounds", running[1:])
        line = JOIN.search(httpx2.get(f"{page}/", timeout=5).text)
        assert line
        began = time.monotonic()
        person = Person("newcomer", folder / "newcomer")
        running.append(person.start(*html.unescape(line[1]).split()[1:]))
        steps = {"first word": wait_for(lambda: bool(person.last_output()), "a first line")}
        steps["on the network"] = steps["first word"] + wait_for(lambda: read_status(person) is not None, "a status")
        wait_for(lambda: contributes(person), "a contribution")
        steps["contributing"] = time.monotonic() - began
        print(person.last_output(), file=sys.stderr)
        time.sleep(keep)
        return steps
    finally:
        stop_all(running)


if __name__ == "__main__":
    sys.exit(main())
