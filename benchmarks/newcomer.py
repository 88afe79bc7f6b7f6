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
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2

from benchmarks.whole_life import play
from node.monitoring.status import NodeStatus, fetch_status
from node.paths import demo_manifest
from protocol.errors import UnreachableError

LIMIT = 60.0  # seconds
PATIENCE = 180.0
LOOK = 0.2
ROUNDS = 2  # that the first peers have made before the newcomer comes
MURMUR = (sys.executable, "-P", "-m", "node.cli")
PAGE = re.compile(r"^page +(\S+)/$", re.MULTILINE)
JOIN = re.compile(r'<code id="join">(.*?)</code>')


class Machine:
    """Of somebody who has nothing but the program: one command runs there, under a home of its own."""

    def __init__(self, home: Path, words: list[str]) -> None:
        home.mkdir(parents=True)
        self.home = home
        self.log = home / "log"
        environment = {**os.environ, "HOME": str(home)}
        environment.pop("XDG_STATE_HOME", None)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([*MURMUR, *words], stdout=log, stderr=log, env=environment, cwd=home)

    def status(self) -> NodeStatus | None:
        for announced in (self.home / ".local/state/murmur").glob("**/node.json"):
            with contextlib.suppress(UnreachableError, OSError, ValueError, KeyError):
                return asyncio.run(fetch_status(json.loads(announced.read_bytes())["metrics_port"], 2.0))
        return None

    def contributes(self) -> bool:
        told = self.status()
        return told is not None and told.contributions_included > 0


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
    with tempfile.TemporaryDirectory() as folder, running() as start:
        steps = newcomer(Path(folder), options.run.resolve(), options.peers, start, options.keep)
    lines = (f"{name:>14} {seconds:6.1f} s" for name, seconds in steps.items())
    print(json.dumps(steps) if options.json else "\n".join(lines))
    return int(steps["contributing"] > LIMIT)


def newcomer(
    folder: Path, run: Path, peers: int, start: Callable[[Path, list[str]], Machine], keep: float
) -> dict[str, float]:
    """Seconds from the command to each step."""
    host = start(folder / "host", ["host", str(run), "--http", "127.0.0.1:0"])
    wait(lambda: PAGE.search(host.log.read_text()) is not None, "the host says where its page is")
    found = PAGE.search(host.log.read_text())
    assert found
    page = found[1]
    print(f"page {page}/", file=sys.stderr, flush=True)
    for number in range(peers):
        start(folder / f"peer-{number}", ["join", f"{page}/run.toml", "--threads", "1", "--name", f"peer-{number}"])
    wait(lambda: int(httpx2.get(f"{page}/api/v1/state", timeout=5).json()["round"]) >= ROUNDS, "the run goes on")
    line = JOIN.search(httpx2.get(f"{page}/", timeout=5).text)
    assert line
    words = html.unescape(line[1]).split()
    began = time.monotonic()
    who = start(folder / "newcomer", words[1:])
    steps = {"first word": wait(lambda: who.log.stat().st_size > 0, "it says something")}
    steps["on the network"] = steps["first word"] + wait(lambda: who.status() is not None, "it is on the network")
    wait(who.contributes, "it contributes")
    steps["contributing"] = time.monotonic() - began
    print(who.log.read_text(), file=sys.stderr)
    time.sleep(keep)
    return steps


def wait(condition: Callable[[], bool], what: str) -> float:
    """The seconds that it took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > PATIENCE:
            raise TimeoutError(f"not in {PATIENCE:g} s: {what}")
        time.sleep(LOOK)
    return time.monotonic() - began


@contextlib.contextmanager
def running() -> Iterator[Callable[[Path, list[str]], Machine]]:
    """Starts machines; in the end none of them runs."""
    machines: list[Machine] = []

    def start(home: Path, words: list[str]) -> Machine:
        machines.append(Machine(home, words))
        return machines[-1]

    try:
        yield start
    finally:
        for machine in machines:
            machine.process.terminate()
        for machine in machines:
            with contextlib.suppress(subprocess.TimeoutExpired):
                machine.process.wait(30)
            machine.process.kill()
            machine.process.wait()


if __name__ == "__main__":
    sys.exit(main())
