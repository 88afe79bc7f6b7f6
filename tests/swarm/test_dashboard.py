"""A host before a live swarm: one line to join by, a page in a real browser, a host that dies and misses nothing."""

import contextlib
import html
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest

from node.commands.status import status_lines
from node.commands.up.peer_process import PeerProcess
from node.daemon.receipts.commit_file import COMMIT_FILE_NAME
from node.daemon.receipts.ledger import commit_verifier, read_ledger
from node.dashboard.event_log import read_events
from node.options import LISTEN_ON_LOOPBACK
from protocol.identity import Identity
from protocol.manifest.run import Manifest
from protocol.signing import open_signed_manifest
from tests.swarm.process_swarm import ENDLESS, START_SECONDS, ProcessSwarm, manifest_with, running_swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

LINE_SECONDS = 60.0  # from the line to a contribution
AWAY_ROUNDS = 10
PRESENT = "#peers tr[data-peer]:not(.gone)"
HOSTILE = "<img src=x onerror=alert(1)>"


def open_run() -> Manifest:
    """On data that every machine has: who joins by a link has nothing but the link."""
    return manifest_with(
        run={"min_peers": 2},
        data={"source": "python-stdlib", "path": ""},
        method={"schedule": {"inner_steps": 60}},
        target={"rounds": ENDLESS},
    )


class DashboardProcess:
    """A host, and the peers that came by what it says."""

    def __init__(self, swarm: ProcessSwarm, *options: str) -> None:
        self.swarm = swarm
        home = swarm.run.parent / "host"
        words = [sys.executable, "-m", "node.cli", "host", str(swarm.run), "--dir", str(home), *options]
        self.host = PeerProcess("host", home, [*words, "--http", "127.0.0.1:0", "--listen", LISTEN_ON_LOOPBACK])
        self.base = ""

    def start(self) -> None:
        self.host.log.unlink(missing_ok=True)
        self.host.folder.mkdir(parents=True, exist_ok=True)
        self.host.start(())
        self.swarm.wait_until(
            lambda: "page " in self.output() or not self.host.is_running, "the host says where its page is"
        )
        found = re.search(r"^page +(\S+)/$", self.output(), re.MULTILINE)
        assert found, self.output()
        self.base = found[1]

    def output(self) -> str:
        return self.host.log.read_text() if self.host.log.exists() else ""

    def get(self, path: str) -> httpx2.Response:
        return httpx2.get(self.base + path, timeout=10)

    def state(self) -> dict[str, Any]:
        values: dict[str, Any] = self.get("/api/v1/state").json()
        return values

    def join(self, run: str, folder: str, name: str = "", peers: Sequence[str] = ()) -> PeerProcess:
        home = self.swarm.run.parent / folder
        words = [sys.executable, "-m", "node.cli", "join", run, "--dir", str(home), "--name", name]
        command = [*words, "--listen", LISTEN_ON_LOOPBACK, "--device", "cpu", "--threads", "1"]
        self.swarm.peers.append(PeerProcess(folder, home, command))
        self.swarm.peers[-1].start(peers)
        return self.swarm.peers[-1]

    def wait_for_round(self, number: int, seconds: float = START_SECONDS) -> None:
        self.swarm.wait_until(lambda: self.state()["round"] >= number, f"the host knows round {number}", seconds)


@contextlib.contextmanager
def running_dashboard(folder: Path) -> Iterator[DashboardProcess]:
    with running_swarm(folder, open_run(), peers=0) as swarm:
        scene = DashboardProcess(swarm)
        try:
            scene.start()
            yield scene
        finally:
            scene.host.kill()


def contributing(swarm: ProcessSwarm) -> int:
    return sum(1 for told in swarm.poll() if told.contributions_included)


def test_one_copied_line_is_enough_and_a_killed_host_misses_nothing(tmp_path: Path) -> None:
    with running_dashboard(tmp_path) as scene:
        line = re.search(r'<code id="join">(.*?)</code>', scene.get("/").text)
        assert line
        command, verb, url = html.unescape(line[1]).split()
        assert (command, verb) == ("murmur", "join")
        signed = open_signed_manifest(scene.get("/run.toml").content, url)
        assert signed.organiser == scene.state()["organiser"] and signed.manifest.run.bootstrap
        began = time.monotonic()
        scene.join(url, "ada")
        scene.join(url, "bob")
        scene.swarm.wait_until(lambda: contributing(scene.swarm) == 2, "both contribute", LINE_SECONDS)
        print(f"from the line to a contribution: {time.monotonic() - began:.1f} s")
        assert "seen for the first time and saved" in scene.swarm.log(scene.swarm.peers[0])
        scene.wait_for_round(3)
        told = status_lines(scene.host.folder, as_json=False, check=True)[0]
        assert "2 peers · " in told and "watching" in told and told.endswith(f"page {scene.base}/")

        scene.host.kill()
        at_death = max(status.round for status in scene.swarm.poll())
        scene.swarm.wait_for_round(at_death + AWAY_ROUNDS)
        scene.start()
        scene.wait_for_round(at_death + AWAY_ROUNDS)
        rounds = scene.get("/api/v1/history").json()["round"]
        assert rounds == list(range(len(rounds))) and scene.state()["missing"] == 0
        indices = [event.kind for event in read_events(scene.host.folder / "events.jsonl")]
        ledger = read_ledger(scene.host.folder / COMMIT_FILE_NAME, commit_verifier)
        assert ledger.missing_rounds == 0 and ledger.head.round >= at_death + AWAY_ROUNDS
        assert indices.count("started") == 1 and indices.count("committed") >= at_death + AWAY_ROUNDS

        address = scene.swarm.peers[0].addresses()[0]
        run_id = scene.swarm.manifest.run_id
        late = scene.join(f"murmur://{run_id}@{address}", "late")
        scene.swarm.wait_until(lambda: any(told.contributions_included for told in scene.swarm.poll(late)), "it gives")
        scene.swarm.wait_until(lambda: scene.state()["active"] == 3, "the host sees all three")


def browser_path() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    return found


@contextlib.contextmanager
def browser_page(**options: Any) -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    switches = ["--no-sandbox", "--disable-background-networking"]
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=browser_path(), args=switches)
        page = browser.new_page(**options)
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.faults = faults
        yield page
        browser.close()


def screenshots(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("MURMUR_SCREENSHOTS") or tmp_path / "screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.mark.nightly  # test_browser.py opens the page of every moment, test_page_of_up.py that of a real swarm
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    browser_path()
    pictures = screenshots(tmp_path)
    with running_dashboard(tmp_path) as scene:
        for folder, name in (("ada", "ada"), ("bob", "bob"), ("eve", "eve"), ("last", HOSTILE)):
            scene.join(f"{scene.base}/run.toml", folder, name)
        scene.wait_for_round(3)
        with browser_page(viewport={"width": 1240, "height": 900}) as page:
            page.goto(scene.base)
            scene.swarm.wait_until(lambda: page.locator(PRESENT).count() == 4, "all four are on the page")
            before = int(page.text_content("#round"))
            scene.swarm.wait_until(lambda: int(page.text_content("#round")) >= before + 2, "the page moves by itself")
            assert page.locator("#loss-chart canvas").count() == 1 and page.locator("#bytes-chart canvas").count() == 1
            assert page.evaluate("rows.length") >= before
            page.screenshot(path=pictures / "light.png", full_page=True)

            victim = scene.swarm.peers[2]
            killed = Identity.load_or_create(victim.folder / "key").peer_id
            victim.kill()
            page.wait_for_selector(f"#peers tr.gone[data-peer='{killed}']", timeout=60_000)
            assert "eve" in page.text_content("#log") and "counts as gone" in page.text_content("#log")
            page.screenshot(path=pictures / "one-gone.png", full_page=True)

            page.emulate_media(color_scheme="dark")
            page.screenshot(path=pictures / "dark.png", full_page=True)
            page.set_viewport_size({"width": 400, "height": 900})
            width = "document.querySelector('#loss-chart canvas').clientWidth"
            scene.swarm.wait_until(lambda: page.evaluate(width) < 400, "the chart has become narrow")
            assert page.evaluate("document.documentElement.scrollWidth") <= 400
            page.screenshot(path=pictures / "narrow.png", full_page=True)
            assert page.faults == []

            scene.host.kill()
            page.wait_for_selector("main.stale", timeout=30_000)
            assert "has not answered" in page.text_content("#notice")
            page.screenshot(path=pictures / "host-gone.png")
            print(f"screenshots in {pictures}")
        with browser_page(java_script_enabled=False) as page:
            scene.start()
            page.goto(scene.base)
            assert int(page.text_content("#round")) >= before
            page.screenshot(path=pictures / "without-scripts.png", full_page=True)
        assert json.loads(scene.get("/api/v1/state").text)["round"] >= before
