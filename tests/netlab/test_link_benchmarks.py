"""The figures of limited links come from where they say: payloads, rates and time."""

import pytest

from benchmarks import beside, links
from benchmarks.links import FLOAT_BYTES, PEERS, Place
from benchmarks.merge.training_step import Stepper
from tests.netlab.laboratory import Laboratory, Link

pytestmark = [pytest.mark.netlab, pytest.mark.timeout(180)]

NUMEL = 500_000


def test_a_merge_and_a_download_use_what_the_link_has(laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "IDLE_STEPS", 2)
    place = Place.built(laboratory, Link(up=20, down=20), PEERS)
    with place.team("benchmarks.merge.murmuration_peer", numel=NUMEL, recipe="averaging", codec="fp16") as team:
        share, ratio = links.merged(place, team, NUMEL, turns=1)
        assert 0.02 < share < 1.2 and 0.8 < ratio < 1.3, "squeezed, a sixth falls away; heads come on top"
        assert 0.1 < links.download_share(place, team, NUMEL, turns=1) < 1.2
        assert 0.3 < beside.step_ratio(team, Stepper(links.DEMO, 0), turns=1) < 30


def test_a_share_of_the_line_is_bits_over_rate_and_time(permitted: None) -> None:
    with Laboratory() as laboratory:
        place = Place(laboratory, [], 100)
        assert place.share(12.5e6, 1.0) == 1.0 and place.share(FLOAT_BYTES, 1.0) == pytest.approx(32e-8)


def test_targets_are_by_setting() -> None:
    good = {"merge_line_share": 0.83, "download_line_share": 0.83}
    assert all(links.reached({"20": good})) and not any(links.reached({"100": good}))
    assert "| merge line share | 0.83 |" in links.table({"20": good}, 50.0)
