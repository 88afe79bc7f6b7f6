"""The page as the server renders it."""

import hashlib
import re
from html.parser import HTMLParser

import pytest

from node.dashboard.events import PeerDeparted, RunAbout, SampleGenerated
from node.dashboard.html_page import ASSETS_DIR, STATIC_DIR, render_page
from node.dashboard.json_views import snapshot
from node.dashboard.peer_columns import PEER_COLUMNS, render_head, render_row
from node.dashboard.state import RunState
from node.units import (
    choose_unit,
    format_duration,
    format_number,
    format_share,
    format_short,
    format_si,
)
from tests.node.dashboard.example_events import (
    FACTS,
    NAMES,
    OPENED,
    apply_all,
    committed,
    joined,
    opening_events,
    timed,
)

HOSTILE = ("<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "$join", "&amp;", "</title><b>")
JOIN = "murmur join http://here/run.toml"


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def elements(text: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Elements()
    parser.feed(text)
    return parser.found


def page(*names: str) -> str:
    people = [joined(peer, name=name, device=name) for peer, name in zip(NAMES, names, strict=False)]
    events = [*opening_events(), *people, committed(0), committed(1, NAMES[:1], late=[NAMES[1]]), timed(1)]
    return render_page(snapshot(apply_all(events), 1100.0), JOIN, "0.1")


def test_page_contains_the_figures_without_scripts() -> None:
    text = page("ada", "bob")
    for figure in ("round 2 of 100", "3.000", "1 of 2 in time", JOIN, "ada", "bob", "small", "not in time"):
        assert figure in text, figure
    assert "$" not in re.sub(r'data-[a-z]+="[^"]*"', "", text)


@pytest.mark.parametrize("name", HOSTILE)
def test_text_from_peers_is_escaped(name: str) -> None:
    """The page has the same elements in the same order as with a harmless name (control); only text differs."""
    assert elements(page(name, name)) == elements(page("ada", "bob"))


def page_about(**facts: str) -> str:
    opened = OPENED.model_copy(update={"facts": FACTS.model_copy(update={"about": RunAbout(**facts)})})
    return render_page(snapshot(apply_all([opened]), 1100.0), JOIN, "0.1")


def test_header_has_the_organisers_facts() -> None:
    text = page_about(
        description="Made by friends", organiser="Ada", licence="MIT", source="text: a.txt", url="https://here/x"
    )
    for fact in ("Made by friends", "Ada", "MIT", "text: a.txt", '<a href="https://here/x" rel="noopener noreferrer">'):
        assert fact in text, fact
    assert "text: a.txt" not in page_about(data="Old books", source="text: a.txt")


@pytest.mark.parametrize("name", HOSTILE)
def test_facts_and_samples_are_escaped_and_only_web_addresses_are_links(name: str) -> None:
    def values(text: str, url: str) -> str:
        sample = SampleGenerated(at=1.0, round=2, prompt=text, text=text)
        facts = RunAbout(description=text, organiser=text, data=text, licence=text, url=url)
        opened = OPENED.model_copy(update={"facts": FACTS.model_copy(update={"about": facts})})
        return render_page(snapshot(apply_all([opened, sample]), 1100.0), JOIN, "0.1")

    harmless = elements(values("x", "javascript:alert(1)"))
    assert elements(values(name, "javascript:alert(1)")) == harmless
    assert not [tag for tag, attributes in harmless if "javascript" in str(attributes)]
    assert len(elements(values("x", "https://here"))) == len(harmless) + 4  # control: a link in its own entry


def test_every_column_shows_a_value_of_the_peer() -> None:
    state = apply_all([*opening_events(), committed(0)])
    (peer, *_) = snapshot(state, 1100.0)["peers"]
    assert {column.key for column in PEER_COLUMNS} <= peer.keys()
    row = elements(render_row(peer, 1100.0))
    assert [tag for tag, _ in row] == ["tr", *["td"] * len(PEER_COLUMNS)]
    assert len(re.findall("<th ", render_head())) == len(PEER_COLUMNS)


def test_page_has_no_inline_styles_inline_scripts_or_third_parties() -> None:
    for tag, attributes in elements(page("ada")):
        assert not {key for key in attributes if key.startswith("on") or key == "style"}, (tag, attributes)
        for key in ("src", "href"):
            address = attributes.get(key) or "/"
            assert address.startswith("/"), (tag, address)
        if tag == "script":
            assert attributes.get("src")
    for file in STATIC_DIR.glob("*.js"):
        if not file.name.startswith("uPlot"):
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", file.read_text())
    assert not re.search(r"https?://(?!www\.w3\.org)", (ASSETS_DIR / "index.html").read_text())


def test_vendored_uplot_matches_its_release() -> None:
    """The files are those of uPlot 1.6.32 (MIT) on npm."""
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in STATIC_DIR.glob("uPlot*")}
    assert found == {
        "uPlot.iife.min.js": "19c8d4c6ad88929a",
        "uPlot.min.css": "df630c6a8d6f8eea",
        "uPlot.LICENSE": "8f989229699b4fe2",
    }


def test_empty_run_and_replay_have_a_page() -> None:
    assert "no peers yet" in render_page(snapshot(RunState(), 1.0), JOIN, "0.1")
    replayed = render_page(snapshot(apply_all(opening_events()), 1.0), None, "0.1")
    assert 'id="join"' not in replayed and "run.toml" not in replayed


def test_departed_peer_is_in_the_log_but_not_in_the_table() -> None:
    events = [*opening_events(), PeerDeparted(at=1050.0, peer=NAMES[0], reason="unreachable")]
    text = render_page(snapshot(apply_all(events), 1100.0), JOIN, "0.1")
    assert f'data-peer="{NAMES[0]}"' not in text and "does not answer and counts as gone" in text


def test_numbers_are_formatted_for_people() -> None:
    sizes = {0: "0", 7: "7", 999: "999", 1_840_000: "1.84 M", 10_000: "10 k", 999_999: "1 M", 3e12: "3 T"}
    assert {value: format_si(value) for value in sizes} == sizes
    times = {
        0: "0 s",
        0.12345: "123 ms",
        3: "3 s",
        3.44: "3.4 s",
        9.97: "10 s",
        75: "1 min 15 s",
        2309: "38 min",
        40_000: "11 h",
        222_222: "2 d 13 h",
    }
    assert {value: format_duration(value) for value in times} == times
    assert format_number(None, 2) == "-" and format_number(1234.5, 1) == "1,234.5"
    short = {0: "0", 0.002: "0.002", 3.5e-4: "3.5e-4", 2e-5: "2e-5", 1.23456: "1.23", 12345: "12.3 k"}
    assert {value: format_short(value) for value in short} == short
    assert format_share(0.1234) == "12.3%" and format_share(None) == format_short(None) == "-"
    assert choose_unit(5)[1] == "k" and choose_unit(5e6)[1] == "M"


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_page_says_that_no_round_is_finished_only_while_none_is(rounds: int) -> None:
    """Without JavaScript too: the text is not on the page."""
    text = render_page(snapshot(apply_all([*opening_events(), *map(committed, range(rounds))]), 1100.0), JOIN, "0.1")
    assert text.count("The first round is not finished yet.") == (0 if rounds else 2)
    assert ("no round yet" in text) == (not rounds)
