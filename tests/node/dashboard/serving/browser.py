"""The page in a real browser: Chromium by Playwright, in light and dark, narrow and wide."""

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from node.daemon.stored_states.model_archive import ModelArchive
from node.dashboard.event_log import EventLog
from node.dashboard.server import DashboardData, build_app
from node.monitoring.http_server import open_listener, serve

WINDOWS = [(scheme, width) for scheme in ("light", "dark") for width in (400, 1400)]
WAIT_SECONDS = 20.0


@dataclass
class Window:
    """A page in a browser; `faults` are errors of its scripts and of the content security policy."""

    page: Any
    faults: list[str] = field(default_factory=list)

    async def wait_until(self, expression: str) -> None:
        """Wait until the JavaScript expression is true. The page's policy forbids Playwright's own way of waiting."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not await self.page.evaluate(expression):
            assert time.monotonic() < deadline, f"{expression} is not true; {self.faults}"
            await asyncio.sleep(0.05)

    async def text(self, selector: str) -> str:
        return str(await self.page.inner_text(selector))


def browser_path() -> str:
    """Return the browser's path; without one the test is skipped."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    return found


@contextlib.asynccontextmanager
async def open_browser() -> AsyncIterator[Any]:
    path = browser_path()
    playwright = pytest.importorskip("playwright.async_api")
    async with playwright.async_playwright() as engine:
        browser = await engine.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-background-networking"]
        )
        yield browser
        await browser.close()


@contextlib.asynccontextmanager
async def open_window(browser: Any, url: str, scheme: str = "light", width: int = 1400) -> AsyncIterator[Window]:
    """Open the page, and wait until its scripts have shown the state and the history."""
    window = Window(await browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme))
    window.page.on("pageerror", lambda error: window.faults.append(str(error)))
    window.page.on("console", lambda line: window.faults.append(line.text) if line.type == "error" else None)
    await window.page.goto(url)
    await window.wait_until("page.dataset.ready === 'yes'")
    yield window
    await window.page.close()


@contextlib.asynccontextmanager
async def served_page(event_log: EventLog, now: float, model: ModelArchive | None = None) -> AsyncIterator[str]:
    """Serve the page of an event log at a fixed time; yields its URL."""

    async def manifest() -> bytes:
        return b""

    data = DashboardData(event_log, manifest, clock=lambda: now, model=model)
    async with serve(build_app(data), open_listener("127.0.0.1", 0, "--http"), 64) as port:
        yield f"http://127.0.0.1:{port}/"


async def find_unreadable(window: Window) -> list[str]:
    """Return the visible texts whose contrast to their background is below 4.5 : 1 (WCAG 2.1 AA)."""
    found: list[str] = await window.page.evaluate(CONTRAST_SCRIPT)
    return found


CONTRAST_SCRIPT = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const linear = (c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const background = (node) => {
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const node of document.querySelectorAll("main *")) {
    const text = [...node.childNodes].filter((one) => one.nodeType === 3).map((one) => one.textContent.trim()).join("");
    if (!text || !node.checkVisibility() || node.closest(".hidden, svg, :disabled")) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(background(node))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) found.push(`${node.tagName}.${node.className}: ${text.slice(0, 40)}`);
  }
  return found;
}"""
