"""The end screen as the server renders it, with names and a sample that contain HTML."""

import re

from node.dashboard.host_report import build_host_report
from node.dashboard.json_views import snapshot
from node.dashboard.run_report import MAX_SHOWN_CONTRIBUTORS, render_end, version_of
from tests.node.daemon.receipts.example_commits import MARY
from tests.node.dashboard.ending.example_end import finished_run
from tests.node.dashboard.example_events import apply_all

STATE = apply_all(finished_run())
REPORT = build_host_report(STATE)
VALUES = snapshot(STATE, 1400.0)
MODEL = {"round": 5, "size": 3_400_000, "is_final": True}


def test_end_screen_shows_result_people_and_downloads() -> None:
    page = render_end(REPORT, {**VALUES, "model": MODEL}, has_receipts=True)
    assert "prose-100m is complete" in page and "3 volunteers gave 900 tokens in 5 rounds" in page
    assert "5.162 \u2192</span> <b>1.562</b>" in page
    assert (
        'href="/model">Download the model (3.4 MB)' in page
        and 'href="/report.md"' in page
        and 'href="/commits.log"' in page
    )
    assert f'href="/receipts/{MARY.peer_id}.json"' in page and "45.7%" in page


def test_version_changes_with_the_model_and_with_every_event() -> None:
    versions = [version_of(VALUES), version_of({**VALUES, "model": MODEL}), version_of({**VALUES, "end_version": "99"})]
    assert len(set(versions)) == 3 and version_of({**VALUES, "end_version": ""}) == ""


def test_text_of_others_is_escaped() -> None:
    page = render_end(REPORT, VALUES, has_receipts=True)
    assert "<img" not in page and "<b>a greeting" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page and "&lt;b&gt;a greeting" in page


def test_links_without_a_target_are_not_shown() -> None:
    page = render_end(REPORT, VALUES, has_receipts=False)
    assert "/model" not in page and "receipt" not in page.lower() and "commits.log" not in page
    assert "hidden" in render_end(None, VALUES, has_receipts=True)


def test_table_of_a_huge_run_is_bounded() -> None:
    many = REPORT.model_copy(update={"contributors": REPORT.contributors * 100})
    page = render_end(many, VALUES, has_receipts=True)
    assert len(re.findall("<tr data-peer", page)) == MAX_SHOWN_CONTRIBUTORS and "and 200 more" in page
