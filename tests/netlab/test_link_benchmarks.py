"""The figures of limited links come from where they say: payloads, rates and time."""

import pytest

from benchmarks import beside, links
from benchmarks.links import FLOAT_BYTES, PEERS, REDUCERS, Place, traffic_ratio
from benchmarks.merge.training_step import Stepper
from tests.netlab.lab.laboratory import Laboratory, Link

pytestmark = [pytest.mark.netlab, pytest.mark.timeout(180)]

NUMEL = 500_000


def test_a_merge_and_a_download_use_what_the_link_has(laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "IDLE_STEPS", 2)
    place = Place.built(laboratory, Link(up=20, down=20), PEERS)
    with links.dense_team(place, NUMEL, REDUCERS) as team:
        share, ratio = links.merged(place, team, NUMEL, turns=1)
        assert 0.02 < share < 1.2
        # Squeezed, a tenth falls away, more at a higher load; heads and the messages of the round come on top.
        assert 0.88 < ratio / traffic_ratio(REDUCERS) < 1.04, (
            "the two reducers, their sums, and one part that is checked"
        )
        assert not 0.88 < ratio / traffic_ratio(1) < 1.04, "the control: one reducer would send a third less"
        assert 0.1 < links.download_share(place, team, NUMEL, turns=1) < 1.2
        assert 0.3 < beside.step_ratio(team, Stepper(links.DEMO, 0), turns=1) < 30


def test_a_share_of_the_line_is_bits_over_rate_and_time(permitted: None) -> None:
    with Laboratory() as laboratory:
        place = Place(laboratory, [], 100)
        assert place.share(12.5e6, 1.0) == 1.0 and place.share(FLOAT_BYTES, 1.0) == pytest.approx(32e-8)


def test_a_second_reducer_costs_half_a_payload_with_its_checks() -> None:
    """Each of 12 parts goes from 3 peers to 2 reducers, its sum to the 2 others; each of 4 peers checks 3 inputs."""
    sent = 12 * 3 * 2 + 12 * 2 + 4 * 3  # twelfths of a contribution
    assert traffic_ratio(1) == 1.0 and traffic_ratio(2) == pytest.approx(sent / (2 * 3 * 12)) == 1.5


def test_targets_are_by_setting() -> None:
    good = {"merge_line_share": 0.83 / 1.5, "trusted_line_share": 0.83, "download_line_share": 0.83}
    assert all(links.reached({"20": good})) and not any(links.reached({"100": good}))
    assert not all(links.reached({"20": good | {"merge_line_share": 0.5}}))
    assert "| trusted line share | 0.83 |" in links.table({"20": good}, 50.0)
