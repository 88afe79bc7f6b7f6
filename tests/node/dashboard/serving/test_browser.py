"""The page in a real browser: layout, charts, table, sample, warnings, and what arrives while it is open."""

import math
import os
import random
from pathlib import Path
from typing import Any

import pytest

from node.commands.eval.results import Result
from node.dashboard.event_log import EventLog
from node.dashboard.events import (
    CommittedContribution,
    LoggedEvent,
    LogOpened,
    ModelEvaluated,
    PeerDeparted,
    PeersUpdated,
    RevisionReport,
    RoundCommitted,
    RoundsMissing,
    RunAbout,
    RunSteered,
    SampleGenerated,
    ValidationMeasured,
)
from tests.node.dashboard.example_events import FACTS, NAMES, joined, peer_report, timed
from tests.node.dashboard.serving.browser import (
    WINDOWS,
    Window,
    find_unreadable,
    open_browser,
    open_window,
    served_page,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

START = 1_700_000_000.0
ROUND_SECONDS = 20.0
ROUNDS = 90
HOSTILE = "<img src=x onerror=alert(1)>"
ABOUT = RunAbout(
    description="A small language model of Python's source, trained by friends on whatever machines they have.",
    organiser="Ada Lovelace",
    data="Python's standard library",
    licence="Apache-2.0",
    url="https://run.example.org/about",
)


def opening(peers: int = 3) -> list[LoggedEvent]:
    facts = FACTS.model_copy(update={"run": "python-small", "about": ABOUT, "parameters": 824_448})
    people = (("ada", "cpu"), ("bob", "NVIDIA GeForce RTX 4090"), (HOSTILE, "cpu"))
    return [
        LogOpened(at=START, facts=facts),
        *(
            joined(peer, at=START, name=name, device=device)
            for peer, (name, device) in list(zip(NAMES, people, strict=False))[:peers]
        ),
    ]


def evaluation(number: int) -> tuple[Result, ...]:
    """Return the results of two tasks after a round."""
    quiz = Result(
        time=number, round=number, tokens=number * 1000, task="quiz", metric="acc", value=number / 100 - 0.38,
        standard_error=0.02, samples=50,
    )  # fmt: skip
    return (quiz, quiz.model_copy(update={"task": HOSTILE, "metric": "loss", "tokens": None, "standard_error": None}))


def committed_round(number: int, rng: random.Random) -> RoundCommitted:
    """Return a round like those of slow and fast peers: contributors and steps vary."""
    is_late, loss = number in range(17, 23), 5.2 * math.exp(-number / 20) + 1.6 + rng.gauss(0, 0.05)
    names = NAMES[:1] if number % 7 == 3 else NAMES[: 2 if is_late else 3]
    given = tuple(
        CommittedContribution(peer=peer, tokens=80_000 // (place + 1), steps=10 // (place + 1), loss=loss, size=45_000)
        for place, peer in enumerate(sorted(names))
    )
    return RoundCommitted(
        at=START + ROUND_SECONDS * (number + 1),
        round=number,
        base=f"{number:064x}",
        digest=f"{number + 1:064x}",
        tokens=200_000 * (number + 1),
        given=given,
        late=(NAMES[2],) if is_late else (),
    )


def measured(number: int, loss: float) -> ValidationMeasured:
    return ValidationMeasured(at=START + ROUND_SECONDS * number, peer=NAMES[0], round=number, loss=loss)


def whole_run() -> list[LoggedEvent]:
    rng = random.Random(1)
    events = opening()
    for number in range(ROUNDS):
        events += [committed_round(number, rng), timed(number, sent=46_000, peers=NAMES[:3])]
        if number % 5 == 4:
            events.append(measured(number + 1, 2.0 + abs(number - 50) / 100))
    return [
        *events,
        SampleGenerated(at=START, round=ROUNDS, prompt="def read(", text="path):\n    return " + "x" * 200),
    ]


def busy_log() -> EventLog:
    event_log = EventLog(None, whole_run())
    device = {"device_use": 0.93, "device_memory": 17_300_000_000, "device_memory_total": 24_000_000_000}
    reports = [
        peer_report(
            peer,
            name=history.report.name,
            device=history.report.device,
            round=ROUNDS,
            loss=1.8,
            learning_rate=2e-3,
            gradient_norm=0.41,
            receiving=18e3,
            sending=20e3,
            bytes_sent=3_300_000,
            seen=now() - 1,
            reach="direct",
            **(device if peer == NAMES[1] else {}),
        )
        for peer, history in event_log.state.peers.items()
    ]
    event_log.record(PeersUpdated(at=now(), peers=tuple(reports)))
    return event_log


def run_on_a_new_host() -> list[LoggedEvent]:
    """Return the events of a host that began after two thirds of the run, whose peers keep the last ten rounds."""
    known = 2 * ROUNDS // 3 - 10
    newer = [
        event for event in whole_run() if not isinstance(event, LogOpened) and getattr(event, "round", known) >= known
    ]
    return [*opening(), RoundsMissing(at=START, first=0, last=known - 1), *newer[3:]]


def steered_log(
    changes: dict[str, bool | int | float | str | list[str] | dict[str, float] | None],
    *,
    is_paused: bool = False,
    target: int | None = None,
) -> EventLog:
    """Return the log of a busy run whose organiser has just signed a revision with these changes."""
    event_log = busy_log()
    facts = event_log.state.facts
    assert facts is not None
    report = RevisionReport(number=1, from_round=ROUNDS, changes=changes, time=now(), holds_from=ROUNDS)
    if target:
        facts = facts.model_copy(update={"target_rounds": target, "target_tokens": None})
    event_log.record(RunSteered(at=now(), facts=facts, revisions=(report,), is_paused=is_paused))
    return event_log


def now() -> float:
    return START + ROUND_SECONDS * (ROUNDS + 1)


async def keep_picture(window: Window, name: str) -> None:
    folder = os.environ.get("MURMUR_SCREENSHOTS")
    if folder:
        await window.page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


async def require_sound(window: Window, width: int) -> None:
    """Require no sideways scrolling, readable text, names for all controls, and no errors."""
    assert await window.page.evaluate("document.documentElement.scrollWidth") <= width
    assert await find_unreadable(window) == []
    assert await window.page.evaluate(UNNAMED_SCRIPT) == []
    assert window.faults == []


UNNAMED_SCRIPT = """[...document.querySelectorAll("button, input, select, [role=img]")].filter((node) =>
  !(node.getAttribute("aria-label") || node.labels?.length || node.textContent.trim())).map((node) => node.outerHTML)"""


async def test_page_of_each_moment_is_sound_in_light_and_dark_narrow_and_wide() -> None:
    moments = {
        "before": EventLog(None, opening(peers=1)),
        "busy": busy_log(),
        "paused": steered_log({"paused": True}, is_paused=True),
        "moved": EventLog(None, run_on_a_new_host()),
        "stopped": steered_log({"target.rounds": ROUNDS}, target=ROUNDS),
    }
    async with open_browser() as browser:
        for name, event_log in moments.items():
            async with served_page(event_log, now()) as url:
                for scheme, width in WINDOWS:
                    async with open_window(browser, url, scheme, width) as window:
                        await keep_picture(window, f"{name}-{scheme}-{width}")
                        await require_sound(window, width)


async def test_facts_of_the_script_are_those_of_the_server() -> None:
    log = EventLog(None, opening())
    for number in (40, 80):
        log.record(ModelEvaluated(at=START + number, results=evaluation(number)))
    async with open_browser() as browser, served_page(log, now()) as url:
        async with open_window(browser, url) as window:
            shown = await window.page.inner_html("#about")
            table = await window.page.inner_html("#results")
            assert HOSTILE in await window.text("#results") and "0.4200" in table and "points" in table
            await keep_picture(window, "evaluations")
            assert "Ada Lovelace" in shown and window.faults == []
            hostile = {**ABOUT.model_dump(), "description": HOSTILE, "url": "javascript:alert(1)"}
            await window.page.evaluate("showAbout", hostile)
            assert await window.text("#about p") == HOSTILE and await window.page.locator("#about a").count() == 0
        page = await browser.new_page(java_script_enabled=False)
        await page.goto(url)
        assert await page.inner_html("#about") == shown
        assert await page.inner_html("#results") == table
        await page.close()


PIPELINE_ROUNDS = 40
COUNTS = {"done": 1200, "partly counted": 0, "lost": 1, "replayed": 2, "dropped": 1}


def pipeline_log() -> EventLog:
    opened, *_ = opening(peers=0)
    assert isinstance(opened, LogOpened)
    facts = opened.facts.model_copy(update={"stages": 3})
    peers = [(NAMES[0], 0, 2.0), (NAMES[1], 0, 1_234.3), (NAMES[2], 2, 1.0)]
    figures = [joined(peer, stage=stage, stage_rate=rate, round=4, microbatches=COUNTS) for peer, stage, rate in peers]
    rng = random.Random(1)
    rounds = [committed_round(number, rng) for number in range(PIPELINE_ROUNDS)]  # of the last stage
    return EventLog(None, [opened.model_copy(update={"facts": facts}), *figures, *rounds])


async def test_stages_of_the_script_are_those_of_the_server() -> None:
    async with open_browser() as browser, served_page(pipeline_log(), now()) as url:
        page = await browser.new_page(java_script_enabled=False)
        await page.goto(url)
        plain = await page.inner_text("#stages")
        await page.close()
        assert "Microbatches: done 3,600, replayed 6, lost 3, dropped 3" in plain
        assert "2 peers · 1,236.3 microbatches/s · round 4" in plain and "nobody serves it" in plain
        for scheme, width in WINDOWS:
            async with open_window(browser, url, scheme, width) as window:
                await keep_picture(window, f"pipeline-{scheme}-{width}")
                await require_sound(window, width)
                assert await window.text("#stages") == plain
                assert await window.page.locator("#loss-chart canvas").is_visible()
                assert await x_range(window) == [1, PIPELINE_ROUNDS]
                assert not await is_any_visible(window, ("#bytes-chart", ".timeline")), "those of one stage say little"
                assert await window.text("#loss") != "-" and await window.text("#tokens") != "0"


async def test_no_axes_and_no_slider_before_the_first_round() -> None:
    event_log = EventLog(None, opening())
    async with open_browser() as browser, served_page(event_log, now()) as url, open_window(browser, url) as window:
        hidden = ("#loss-chart canvas", "#bytes-chart canvas", "#chart-tools", "#scrub-box", "#sample")
        assert not await is_any_visible(window, hidden)
        assert (await window.text(".charts")).count("The first round is not finished yet.") == 2
        rng = random.Random(1)
        for number in range(2):
            event_log.record(committed_round(number, rng))
            event_log.record(timed(number))
        event_log.record(SampleGenerated(at=START, round=2, prompt="def ", text=HOSTILE))
        await window.wait_until("shown.length === 2 && !document.getElementById('loss-chart').matches('.blank')")
        assert await window.page.locator("#loss-chart canvas").is_visible()
        assert await window.page.locator("#scrub-box").is_visible()
        assert "after round 2" in await window.text("#sample h2") and HOSTILE in await window.text("#sample pre")
        assert await window.page.evaluate("lossPlot.plot.scales.x.min >= 1 && lossPlot.plot.scales.x.max <= 2")
        assert window.faults == []


async def is_any_visible(window: Window, selectors: tuple[str, ...]) -> bool:
    return any([await window.page.locator(selector).is_visible() for selector in selectors])


async def test_charts_have_axes_smoothing_and_zoom() -> None:
    async with open_browser() as browser, served_page(busy_log(), now()) as url, open_window(browser, url) as window:
        page = window.page
        full = await x_range(window)
        assert full == [1, ROUNDS]
        await drag_over_chart(page)
        await window.wait_until("zoom !== null")
        low, high = await x_range(window)
        assert 1 < low < high < ROUNDS, "the part that was dragged over"
        await page.dblclick("#loss-chart .u-over")
        await window.wait_until("zoom === null")
        assert await x_range(window) == full

        for key, press in (("zoom-in", "Enter"), ("earlier", "Space")):  # reachable and usable by keyboard
            await page.focus(f"#{key}")
            await page.keyboard.press(press)
        low, high = await x_range(window)
        assert low == 1 and high == pytest.approx(1 + (ROUNDS - 1) / 2)
        await page.click("#zoom-all")
        assert await x_range(window) == full and await page.is_disabled("#zoom-out")

        await page.select_option("#axis", "time")
        assert await x_range(window) == [ROUND_SECONDS, ROUND_SECONDS * ROUNDS]
        await page.select_option("#axis", "tokens")
        assert await x_range(window) == [200_000, 200_000 * ROUNDS]
        raw = await page.evaluate(ROUGHNESS)
        await page.fill("#smooth", "4")
        assert await page.get_attribute("#smooth", "aria-valuetext") == "over 16 rounds"
        assert await page.evaluate(ROUGHNESS) < raw / 3
        assert window.faults == []


async def test_baseline_has_no_comb() -> None:
    """Control: the figures of single rounds, some with one contributor, jump between neighbours."""
    async with open_browser() as browser, served_page(busy_log(), now()) as url, open_window(browser, url) as window:
        rounds = await window.page.evaluate("rows.map((row) => row.raw)")
        drawn = await window.page.evaluate("bytesPlot.plot.data[2]")
        settled = drawn[len(drawn) // 2 :]
        assert largest_jump(rounds) > 0.5 and largest_jump(settled) < 0.05 and None not in drawn


def largest_jump(values: list[Any]) -> float:
    return float(max(abs(b - a) / max(a, b, 1) for a, b in zip(values, values[1:], strict=False)))


ROUGHNESS = """((line) => {
  const steps = line.slice(1).map((value, index) => Math.abs(value - line[index]));
  return steps.reduce((sum, step) => sum + step, 0) - (line[0] - line[line.length - 1]);
})(lossPlot.plot.data[2])"""


async def x_range(window: Window) -> list[float]:
    found: list[float] = await window.page.evaluate("[lossPlot.plot.scales.x.min, lossPlot.plot.scales.x.max]")
    return found


async def drag_over_chart(page: Any) -> None:
    box = await page.locator("#loss-chart .u-over").bounding_box()
    middle = box["y"] + box["height"] / 2
    await page.mouse.move(box["x"] + 0.3 * box["width"], middle)
    await page.mouse.down()
    await page.mouse.move(box["x"] + 0.6 * box["width"], middle, steps=5)
    await page.mouse.up()


async def test_warning_and_grouped_log_lines_arrive_while_the_page_is_open() -> None:
    event_log = busy_log()
    async with open_browser() as browser, served_page(event_log, now()) as url, open_window(browser, url) as window:
        assert "rounds 17 to 22 without <img" in await window.text("#log")
        assert "has risen from 2.010 after round 50 to 2.390 after round 90" in await window.text("#warnings")
        before = await window.page.locator("#log li").count()
        for moment in range(3):
            event_log.record(PeerDeparted(at=now() + 60 * moment, peer=NAMES[1], reason="expired"))
            event_log.record(joined(NAMES[1], at=now() + 60 * moment + 20, name="bob"))
        await window.wait_until("document.getElementById('log').textContent.includes('3 absences')")
        assert await window.page.locator("#log li").count() == before + 1
        assert window.faults == []


async def test_table_has_two_views_and_hides_empty_columns() -> None:
    async with open_browser() as browser, served_page(busy_log(), now()) as url, open_window(browser, url) as window:
        page = window.page
        assert await page.locator("th[data-key=device_use]").is_visible()
        assert not await page.locator("th[data-key=share]").is_visible()
        await page.click("[data-show=given]")
        assert await page.get_attribute("[data-show=given]", "aria-pressed") == "true"
        assert await page.locator("th[data-key=share]").is_visible()
        assert not await page.locator("th[data-key=device_use]").is_visible()
        await page.click("th[data-key=given_tokens] button")
        assert await page.get_attribute("th[data-key=given_tokens]", "aria-sort") == "descending"
        tokens = [await page.evaluate(f"state.peers.get('{peer}').given_tokens") for peer in await listed(page)]
        assert tokens == sorted(tokens, reverse=True) and len(set(tokens)) == 3
        await page.click("[data-show=now]")
        button = page.locator("#peers button").first
        await button.press("Enter")
        assert await button.inner_text() == (await listed(page))[0]
        assert await page.locator("#filter").is_visible()
        assert window.faults == []
    without_gpu = EventLog(None, opening())
    async with open_browser() as browser, served_page(without_gpu, now()) as url, open_window(browser, url) as window:
        assert not await window.page.locator("th[data-key=device_use]").is_visible()


async def listed(page: Any) -> list[str]:
    found: list[str] = await page.evaluate("[...document.querySelectorAll('#peers tr')].map((row) => row.dataset.peer)")
    return found


async def test_run_that_everybody_left_politely_is_neither_red_nor_faded() -> None:
    """Control: the same run whose peers fell silent has red words."""
    for reason, reds in (("left", 0), ("expired", 3)):
        event_log = busy_log()
        for peer in NAMES[:3]:
            event_log.record(PeerDeparted(at=now(), peer=peer, reason=reason))
        async with open_browser() as browser, served_page(event_log, now()) as url, open_window(browser, url) as window:
            assert await window.page.locator("#peers .bad").count() == reds
            assert await window.page.locator("#peers tr.gone").count() == reds
            await window.page.evaluate("lastMessageAt = 0; watchHost()")  # the host has stopped too
            assert await window.page.evaluate("page.classList.contains('stale')") == (reason != "left")
            if reason == "left":
                assert "these are the last figures" in await window.text("#notice")
