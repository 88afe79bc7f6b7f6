"""The organiser's revisions on the page: which there are, from when each holds, and what the browser shows."""

import dataclasses
from typing import Any

import pytest

from node.dashboard.events import LogOpened, RevisionReport, RunSteered
from node.dashboard.html_page import render_revisions
from node.dashboard.json_views import run_status, snapshot
from node.dashboard.steering import AdoptionRecord, revision_values
from protocol.blobs.blob import Blob
from protocol.consensus.chain import Chain
from protocol.consensus.messages.contributions import Adoption
from protocol.manifest.run import Manifest
from protocol.steering import SignedRevision, describe_changes
from tests.node.dashboard.example_events import FACTS, committed
from tests.node.dashboard.serving.browser import WINDOWS, open_browser, open_window, served_page
from tests.node.dashboard.serving.test_browser import busy_log, keep_picture, now, require_sound
from tests.node.dashboard.test_swarm_watcher import ADA, FakeNodeHandle, Scene, record, watcher_of
from tests.node.loop.test_steering import signed_revision
from tests.node.small_run import MANIFEST, RUN_ID, commit_of

HOSTILE = "<img src=x onerror=alert(1)>"
FIRST = RevisionReport(
    number=1, from_round=40, changes={"target.rounds": 200, "train.learning_rate": 0.001}, time=1.7e9, holds_from=41
)
SECOND = RevisionReport(number=2, from_round=90, changes={"paused": True, "about.description": HOSTILE}, time=1.7e9)


def steered(*reports: RevisionReport, **fields: Any) -> RunSteered:
    facts = FACTS.model_copy(update={"target_rounds": 200})
    return RunSteered(at=2000.0, facts=facts, revisions=reports, **fields)


class SteeredScene(Scene):
    """A host that watches a run with one trainer, and the revisions that reach it."""

    def __init__(self, manifest: Manifest = MANIFEST) -> None:
        super().__init__()
        facts = FACTS.model_copy(update={"stages": manifest.pipeline.stages})
        self.event_log.record(LogOpened(at=0.0, facts=facts))
        self.watcher = watcher_of(FakeNodeHandle(self.directory, manifest=manifest), self.event_log)
        self.directory.records = {ADA: record()}
        self.log = self.watcher._node.revisions
        self.watcher.poll(1.0)
        self.kinds()

    def sign(self, from_round: int, **values: Any) -> SignedRevision:
        revision = signed_revision(self.log.revisions, from_round, **values)
        self.log.add(revision)
        return revision

    def shown(self) -> list[tuple[int, int | None]]:
        state = self.event_log.state.steered
        return [(report.number, report.holds_from) for report in state.revisions] if state else []


def test_host_records_a_revision_when_it_hears_of_it_and_when_a_commit_adopts_it() -> None:
    scene = SteeredScene()
    revision = scene.sign(2, target__rounds=7)
    scene.watcher.poll(2.0)
    scene.watcher.poll(2.5)
    assert scene.kinds() == ["steered"] and scene.shown() == [(1, None)]
    assert scene.event_log.state.log[-1].text == "the organiser: revision 1: target.rounds = 7, from round 2"
    commit = commit_of(Chain.from_genesis(RUN_ID).head, {2: Blob.of(b"x")}).body
    adopting = dataclasses.replace(commit, round=4, adoption=Adoption(revision.digest, (revision,)))
    scene.watcher._adoptions.record([adopting])
    for number in range(5):
        scene.event_log.record(committed(number))
    scene.kinds()
    scene.watcher.poll(3.0)
    assert scene.kinds() == ["steered"] and scene.shown() == [(1, 5)], "late: from the round after its adoption"
    facts = scene.event_log.state.facts
    assert facts is not None and facts.target_rounds == 7
    assert scene.event_log.state.log[-1].text.endswith("holds from round 5")


def test_page_says_that_a_run_is_paused_and_for_how_long_a_target_holds() -> None:
    scene = SteeredScene()
    scene.sign(0, paused=True)
    scene.watcher.poll(2.0)
    assert run_status(scene.event_log.state) == ("paused", "busy", "paused by the organiser since round 0")
    scene.sign(0, paused=False, target__rounds=300)
    scene.watcher.poll(3.0)
    values = snapshot(scene.event_log.state, 3.0)
    assert values["status"] != "paused" and values["target_rounds"] == 300
    assert [report["number"] for report in values["revisions"]] == [1, 2]


def test_a_revision_keeps_its_round_over_a_restart_of_the_host() -> None:
    revision = signed_revision((), 3, target__rounds=9)
    report = RevisionReport(number=1, from_round=3, changes={"target.rounds": 9}, time=1.0, holds_from=8)
    assert AdoptionRecord().holds_from(revision, {1: report}) == 8
    assert AdoptionRecord().holds_from(revision, {}) is None
    assert AdoptionRecord().holds_from(revision, {1: report.model_copy(update={"time": 2.0})}) is None, "another one"


def test_server_escapes_the_values_of_a_revision() -> None:
    page = render_revisions([revision_values(FIRST), revision_values(SECOND)])
    assert HOSTILE not in page and "&lt;img" in page and page.index("pause") < page.index("target.rounds = 200")
    assert "from round 90, not adopted yet" in page and " hidden" in render_revisions([])


def test_page_and_log_say_that_a_revision_stops_the_run() -> None:
    report = RevisionReport(number=2, from_round=9, changes={"target.rounds": 9}, time=1.7e9, holds_from=9)
    assert revision_values(report)["text"] == "2: stop, since round 9"
    assert revision_values(report.model_copy(update={"from_round": 8}))["text"] == "2: target.rounds = 9, since round 9"
    revision = signed_revision((), 9, target__rounds=9)
    assert describe_changes(revision.body) == "1: the run stops after round 9"


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_revisions_in_the_browser_are_those_of_the_server_and_follow_the_run() -> None:
    event_log = busy_log()
    async with open_browser() as browser, served_page(event_log, now()) as url:
        async with open_window(browser, url) as window:
            assert not await window.page.locator("#steering").is_visible()
            event_log.record(steered(FIRST, news="revision 1"))
            await window.wait_until("document.querySelectorAll('#revisions li').length === 1")
            event_log.record(steered(FIRST, SECOND))
            await window.wait_until("document.querySelectorAll('#revisions li').length === 2")
            by_script = await window.page.inner_html("#revisions")
            assert HOSTILE in await window.text("#revisions") and "of 200" in await window.text("#target")
            assert window.faults == []
        page = await browser.new_page(java_script_enabled=False)
        await page.goto(url)
        assert await page.inner_html("#revisions") == by_script
        await page.close()
        for scheme, width in WINDOWS:
            async with open_window(browser, url, scheme, width) as window:
                await window.page.locator("#steering").scroll_into_view_if_needed()
                await keep_picture(window, f"steering-{scheme}-{width}")
                await require_sound(window, width)
