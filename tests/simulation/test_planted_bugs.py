"""What the seeds of `test_seeds` would prove nothing without; and each rule that keeps them right, taken away."""

from collections.abc import Sequence
from typing import Any

import pytest

from protocol.consensus.events import Rejected
from protocol.consensus.messages import buffer as message_buffer
from protocol.errors import ForgedError
from tests.simulation.bugs import BUGS, HISTORY_BUGS, Bug
from tests.simulation.seeded_run import SIZE_CONFLICT, InvariantError, SeededRun, scenario_of
from tests.simulation.virtual.network import NAMES, Network, make_contribution, make_signer
from tests.slices import sliced

pytestmark = pytest.mark.slow

SEARCHED = 400


def test_faults_of_all_kinds_are_met() -> None:
    reasons: set[str] = set()
    seen: set[str] = set()
    unresolved = 0
    expected = {"leader silent", "leader left", "reducer left", "not fetched", "late", "left out", "stale view"}
    words = {"is", "comes", "freezes", "splits", "loses", "takes"}
    stories = [SeededRun(9, isolating=True)]  # peers that were apart for long take over a chain
    stories += [SeededRun(seed) for seed in range(60)]
    for story in stories:
        story.run()
        unresolved += story.swarm.unresolved
        reasons |= {reason for _, _, reason in story.swarm.rejections}
        seen |= {what.split(" ")[0] for _, _, what in story.swarm.network.trace if isinstance(what, str)}
        if unresolved and reasons >= expected and seen >= words:
            return
    raise AssertionError(f"never met: {expected - reasons}, {words - seen}; {unresolved} unresolved")


@pytest.mark.parametrize(("bug", "word", "faults", "first"), BUGS, ids=lambda value: getattr(value, "__name__", None))
def test_each_bug_is_found(
    bug: Bug, word: str, faults: Sequence[str], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    found = next((seed for seed in range(first, first + SEARCHED) if word in outcome(seed, faults)), None)
    assert found is not None, f"no seed shows {word!r}"
    print(f"seed {found}: {word}")
    monkeypatch.undo()
    assert outcome(found, faults) == "", "the same seed without the bug"


@pytest.mark.parametrize("bug", HISTORY_BUGS, ids=lambda bug: bug.__name__)
def test_each_bug_with_an_invented_history_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    found = next((seed for seed in range(SEARCHED) if "invented chain" in lied_to(seed)), None)
    assert found is not None, "no seed shows it"
    monkeypatch.undo()
    assert lied_to(found) == "", "the same seed without the bug"


def lied_to(seed: int) -> str:
    try:
        SeededRun(seed, lies=("invented history",)).run()
    except InvariantError as broken:
        return str(broken)
    return ""


def test_a_twin_of_another_size_harms_nobody() -> None:
    """The control is the bug of counting by digests."""
    stories = [SeededRun(seed, faults=SIZE_CONFLICT) for seed in range(60)]
    for story in stories:
        story.run()
    assert sum(bool(story.swarm.invented_blobs) for story in stories) > 30


def outcome(seed: int, faults: Sequence[str] = ()) -> str:
    try:
        SeededRun(seed, faults=faults).run()
    except InvariantError as broken:
        return str(broken)
    return ""


def test_the_same_seed_is_the_same_story() -> None:
    first, second = SeededRun(5), SeededRun(5)
    first.run()
    second.run()
    assert [key(entry) for entry in first.swarm.network.trace] == [key(entry) for entry in second.swarm.network.trace]


def key(entry: tuple[float, str, Any]) -> tuple[float, str, str]:
    time, peer, what = entry
    return time, peer, what.reason if isinstance(what, Rejected) else type(what).__name__


def test_nobody_can_speak_for_another() -> None:
    scenario = scenario_of(0)
    network = Network(scenario, 0)
    signed = make_signer(NAMES[0])("contribution", make_contribution(NAMES[0], 0, bytes(32), scenario).to_wire())
    assert network.open(signed).sender == NAMES[0]
    signed.peer = NAMES[1]
    with pytest.raises(ForgedError):
        network.open(signed)


def growth(seed: int) -> float:
    """How many more entries the fullest table of the last rounds has than that of the first ones."""
    story = SeededRun(seed, faults=("freeze",), rounds=30)
    story.run()
    peaks = story.swarm.peaks
    return max(peaks[number] for number in range(22, 30)) / max(peaks[number] for number in range(8))


@pytest.mark.parametrize("seed", sliced([1, 2], 1))
def test_tables_do_not_grow_with_the_rounds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bounded = growth(seed)
    monkeypatch.setattr(message_buffer, "MAX_KEPT_DECISIONS", 1000)
    unbounded = growth(seed)
    print(f"{bounded:.2f} against {unbounded:.2f}")
    assert bounded < 1.25 < unbounded
