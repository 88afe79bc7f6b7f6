"""The link to the model on the page, before the run has ended."""

import asyncio
import random
from pathlib import Path

import pytest

from node.daemon.stored_states.model_archive import ModelArchive, model_values
from node.dashboard.event_log import EventLog
from node.dashboard.html_page import render_page
from node.dashboard.json_views import snapshot, summary
from tests.node.daemon.stored_states.test_model_archive import archive_of, save_round
from tests.node.dashboard.serving.browser import WINDOWS, find_unreadable, open_browser, open_window, served_page
from tests.node.dashboard.serving.test_browser import ROUND_SECONDS, START, committed_round, opening
from tests.node.small_run import MANIFEST

NOW = START + 10 * ROUND_SECONDS


@pytest.fixture
def event_log() -> EventLog:
    rng = random.Random(0)
    return EventLog(None, [*opening(), *(committed_round(number, rng) for number in range(9))])


@pytest.fixture
def archive(tmp_path: Path) -> ModelArchive:
    (tmp_path / "run.toml").write_text(MANIFEST.to_toml())
    return archive_of(tmp_path)


def test_page_without_scripts_links_the_model_once_there_is_one(event_log: EventLog, archive: ModelArchive) -> None:
    values = snapshot(event_log.state, NOW)
    assert '<p id="model" class="model" hidden></p>' in render_page({**values, **model_values(archive)}, "join", "1")
    save_round(archive._folders[0], 7)
    page = render_page({**values, **model_values(archive)}, "join", "1")
    assert "The model, after round 7 (3.17 kB)" in page and '<a href="/model">download</a>' in page


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_link_follows_the_newest_model(event_log: EventLog, archive: ModelArchive, tmp_path: Path) -> None:
    async with served_page(event_log, NOW, archive) as url, open_browser() as browser:
        for scheme, width in WINDOWS:
            async with open_window(browser, url, scheme, width) as window:
                await window.wait_until("document.querySelector('#model').hidden === (state.model === null)")
                save_round(tmp_path, 7)
                while event_log.subscriber_count != 1:  # this window listens, and the one before does not any more
                    await asyncio.sleep(0.01)
                event_log.broadcast("now", {**summary(event_log.state, NOW), **model_values(archive), "moved": []})
                await window.wait_until("document.querySelector('#model a')")
                assert "after round 7" in await window.text("#model") and not await find_unreadable(window)
                await window.page.screenshot(path=tmp_path / f"model-{scheme}-{width}.png")
                assert not window.faults
