"""The end screen in a real browser: it appears by itself, light and dark, on a phone and on a desk."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from node.daemon.receipts.receipt import ReceiptIssuer, read_receipt, verify_receipts
from node.dashboard.event_log import EventLog
from node.dashboard.server import DashboardData, build_app
from node.monitoring.http_server import open_listener, serve
from tests.node.daemon.receipts.example_commits import HOST, MARY, THREE_PEERS, chain, extend, log_in
from tests.node.dashboard.ending.example_end import NAMES, ROUNDS, finished_run, first_rounds, last_events
from tests.node.dashboard.serving.test_server import the_manifest
from tests.swarm.test_dashboard import browser_path

pytestmark = pytest.mark.slow

FADED_OR_RED = """(() => {
  const probe = document.createElement('i');
  probe.className = 'bad';
  document.body.append(probe);
  const red = getComputedStyle(probe).color;
  probe.remove();
  return [...document.querySelectorAll('main *')].filter((node) => node.offsetParent
    && !node.matches('button:disabled') && (getComputedStyle(node).color === red || getComputedStyle(node).opacity < 1))
    .map((node) => node.outerHTML.slice(0, 200));
})()"""


@asynccontextmanager
async def open_page(data: DashboardData, **options: Any) -> AsyncIterator[Any]:
    playwright = pytest.importorskip("playwright.async_api")
    listener = open_listener("127.0.0.1", 0, "--http")
    async with serve(build_app(data), listener, 64) as port, playwright.async_playwright() as engine:
        browser = await engine.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        page = await browser.new_page(**options)
        page.faults = []
        page.on("pageerror", lambda error: page.faults.append(str(error)))
        page.on("console", lambda line: page.faults.append(line.text) if line.type == "error" else None)
        await page.goto(f"http://127.0.0.1:{port}/")
        yield page
        await browser.close()


def pictures_in(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("MURMUR_SCREENSHOTS") or tmp_path / "screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


async def test_end_screen_appears_by_itself_and_receipts_verify(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    extend(log, chain(THREE_PEERS))
    event_log = EventLog(None, first_rounds(ROUNDS - 1))
    receipts = ReceiptIssuer(log, "prose-100m", HOST, lambda peer: NAMES[peer])
    data = DashboardData(event_log, the_manifest, clock=lambda: 1400.0, receipts=receipts)
    async with open_page(data, viewport={"width": 1400, "height": 1000}) as page:
        await page.wait_for_selector("#peers tr[data-peer]")
        assert not await page.is_visible("#end") and await page.is_visible(".tiles")
        for event in [*first_rounds(ROUNDS)[-2:], *last_events()]:
            event_log.record(event)
        await page.wait_for_selector("#end pre")
        assert "prose-100m is complete" in await page.text_content("#end h2")
        assert not await page.is_visible(".tiles") and not await page.is_visible(".join")
        assert await page.locator("#end tbody tr").count() == 3 and await page.locator("#end img").count() == 0
        assert await page.evaluate(FADED_OR_RED) == []
        async with page.expect_download() as download:
            await page.click(f"#end tr[data-peer='{MARY.peer_id}'] a")
        saved = tmp_path / "mary.json"
        await (await download.value).save_as(saved)
        verify_receipts([read_receipt(saved)], log.path)
        assert page.faults == []


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_end_screen_of_a_replay_fits(scheme: str, width: int, tmp_path: Path) -> None:
    event_log = EventLog(None, finished_run())
    data = DashboardData(event_log, None, clock=lambda: event_log.state.newest_at)
    options = {"viewport": {"width": width, "height": 1000}, "color_scheme": scheme}
    async with open_page(data, **options) as page:
        await page.wait_for_selector("#loss-chart canvas")
        assert await page.is_visible("#end") and "def h" in await page.text_content("#end pre")
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        assert await page.evaluate(FADED_OR_RED) == []
        await page.screenshot(path=pictures_in(tmp_path) / f"end-{scheme}-{width}.png", full_page=True)
        assert page.faults == []
