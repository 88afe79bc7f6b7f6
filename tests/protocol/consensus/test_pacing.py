"""Steps from measured rounds: slow machines, equal ones with noise, pairs, and what a person reads."""

import math
import random
from collections.abc import Sequence

import pytest

from protocol.consensus.pacing import COARSE_STEP, Pacing

FULL, GRACE, TOKENS = 40, 5.0, 10


class FakeMachine:
    """A peer with its pacing; `noise` is the share by which a step may take longer."""

    def __init__(
        self, seconds: float, seed: int = 0, noise: float = 0.0, full: int = FULL, overlaps: bool = False
    ) -> None:
        self.pacing = Pacing(GRACE, lambda number: full, TOKENS, lambda number: overlaps)
        self.full = full
        self._seconds = seconds
        self._noise = noise
        self._rng = random.Random(seed)
        self._step = 0
        self._total = 0.0

    def seconds(self) -> float:
        each = self._seconds * (1 + self._noise * self._rng.random())
        self._step = self._step + 1
        self._total = self._total + each
        self.pacing.record_steps(self._step, self._total)
        return each

    def arrival(self, number: int, asked_at: float) -> tuple[float, int]:
        """When its message comes, and with how many steps; it is asked for it at that time."""
        self.pacing.open_round(number, 0.0)
        now, steps = 0.0, 0
        while steps < self.pacing.steps_for(number) and (now < asked_at or not steps):
            now, steps = now + self.seconds(), steps + 1
        if now > asked_at:
            self.pacing.record_early_request(asked_at)
        self.pacing.record_submit(steps, now)
        return now, steps


def rounds(machines: Sequence[FakeMachine], count: int) -> list[list[int]]:
    """The steps of each machine in each round; nobody is asked before half are in."""
    made = []
    for number in range(count):
        full = sorted(machine._seconds * machine.full * (1 + machine._noise) for machine in machines)
        half = full[(len(full) - 1) // 2]
        came = [
            one.arrival(number, half + GRACE - one.pacing.early_submit_policy(number).margin_seconds)
            for one in machines
        ]
        for me, machine in enumerate(machines):
            least = machine.pacing.early_submit_policy(number).min_full_tokens
            others = {str(who): at for who, (at, steps) in enumerate(came) if who != me and steps * TOKENS >= least}
            machine.pacing.close_round(others, list(map(str, range(len(machines)))))
        made.append([steps for _, steps in came])
    return made


@pytest.mark.parametrize("slower", [2.0, 4.0, 16.0, 1000.0])
def test_a_slow_machine_makes_its_share_and_the_others_all(slower: float) -> None:
    found = rounds([FakeMachine(0.1), FakeMachine(0.1), FakeMachine(0.1), FakeMachine(0.1 * slower)], 12)
    for steps in found[4:]:
        assert steps[:3] == [FULL] * 3
        assert max(1, FULL // slower - 1) <= steps[3] <= max(1, FULL / slower + 1)


@pytest.mark.parametrize("seed", range(20))
def test_equal_machines_make_all_steps_whatever_the_noise(seed: int) -> None:
    machines = [FakeMachine(0.1, seed * 10 + index, noise=0.5) for index in range(3)]
    assert rounds(machines, 20) == [[FULL] * 3] * 20


def test_without_the_slack_noise_would_cost_equal_machines_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    monkeypatch.setattr("protocol.consensus.pacing.FULL_SHARE", 1.0)
    monkeypatch.setattr("protocol.consensus.pacing.MAX_LATENESS", 0.0)
    machines = [FakeMachine(0.1, index, noise=0.5) for index in range(3)]
    assert rounds(machines, 20) != [[FULL] * 3] * 20


def test_a_machine_that_is_fast_again_makes_all_steps_again() -> None:
    machines = [FakeMachine(0.1), FakeMachine(0.1), FakeMachine(0.1), FakeMachine(0.4)]
    assert rounds(machines, 6)[-1][3] < FULL // 3
    machines[3]._seconds = 0.1
    assert rounds(machines, 8)[-1] == [FULL] * 4


def test_one_stall_changes_nothing() -> None:
    machines = [FakeMachine(0.1) for _ in range(4)]
    rounds(machines, 3)
    machines[0]._seconds = 0.16  # late by 2.4 s of a grace of 5 s
    rounds(machines, 1)
    machines[0]._seconds = 0.1
    assert rounds(machines, 2) == [[FULL] * 4] * 2


def test_two_short_peers_do_not_lower_each_other() -> None:
    pair = [Pacing(GRACE, lambda number: FULL, TOKENS) for _ in range(2)]
    for pacing in pair:
        pacing.open_round(0, 0.0)
        pacing.record_steps(1, 0.1)
        pacing.record_steps(2, 0.2)
    least = pair[0].early_submit_policy(0).min_full_tokens
    assert FULL // 4 * TOKENS < least <= FULL * TOKENS, "a quarter of the steps is no example"


def rounds_that_close(machines: Sequence[FakeMachine], count: int) -> list[list[int]]:
    """The same where a round is over when half are in and the grace has passed; 0: too late, and nobody was asked."""
    made = []
    for number in range(count):
        came = [one.arrival(number, float("inf")) for one in machines]
        over = sorted(at for at, _ in came)[(len(came) - 1) // 2] + GRACE
        for me, machine in enumerate(machines):
            if came[me][0] > over:
                machine.pacing.open_round(number, 0.0)
            least = machine.pacing.early_submit_policy(number).min_full_tokens
            in_time = {str(who): steps for who, (at, steps) in enumerate(came) if at <= over}
            whole = [who for who, steps in in_time.items() if who != str(me) and steps * TOKENS >= least]
            machine.pacing.close_round({who: came[int(who)][0] for who in whole}, in_time)
        made.append([steps if at <= over else 0 for at, steps in came])
    return made


def slow_for_a_while() -> list[FakeMachine]:
    """Five of eight were four times slower; now all are alike, and a whole round's steps take longer than the grace."""
    machines = [FakeMachine(1.0) for _ in range(8)]
    for machine in machines[3:]:
        machine._seconds = 4.0
    slow = rounds(machines[:5], 6)[-1]
    rounds([*machines[:3], *machines[5:]], 6)
    assert slow[3:] == [FULL // 4] * 2
    for machine in machines:
        machine._seconds = 1.0
        machine.seconds()
    return machines


def test_a_swarm_of_which_half_were_slow_makes_whole_rounds_again() -> None:
    made = rounds_that_close(slow_for_a_while(), 10)
    assert made[0] == [0, 0, 0, *[FULL // 4] * 5], "who makes all is too late for the rounds of those who do not"
    assert made[-1] == [FULL] * 8


def test_it_would_stay_at_their_steps_if_they_waited_for_an_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    monkeypatch.setattr(Pacing, "_steps_without_reference", lambda self: None)
    assert rounds_that_close(slow_for_a_while(), 30)[-1] == [0, 0, 0, *[FULL // 4] * 5]


def test_one_round_without_an_example_changes_nothing_and_two_no_more_than_double() -> None:
    slow = FakeMachine(0.4)
    rounds([FakeMachine(0.1), FakeMachine(0.1), FakeMachine(0.1), slow], 6)
    before = slow.pacing.steps_for(6)
    for number, steps in ((6, before), (7, 2 * before)):
        slow.arrival(number, float("inf"))
        slow.pacing.close_round({}, ())
        assert slow.pacing.steps_for(number + 1) == steps


@pytest.mark.parametrize(("number", "included", "steps"), [(6, ["late"], 10), (6, ["other"], 20), (8, ["other"], 10)])
def test_who_was_too_late_for_the_last_round_is_no_example(number: int, included: list[str], steps: int) -> None:
    """It comes early, with steps that are older than the round. Of a round that we missed we do not know."""
    slow = FakeMachine(0.4)
    rounds([FakeMachine(0.1), FakeMachine(0.1), FakeMachine(0.1), slow], 6)
    slow.pacing.open_round(5, 0.0)
    slow.pacing.close_round({}, included)
    for round_number in (number, number + 1):
        slow.arrival(round_number, float("inf"))
        slow.pacing.close_round({"late": 4.0}, included)
    assert slow.pacing.steps_for(number + 2) == steps


def test_a_peer_of_coarse_steps_is_asked_as_soon_as_the_others_are_in() -> None:
    slow = FakeMachine(COARSE_STEP * GRACE * 1.1, full=FULL)
    rounds([FakeMachine(0.5), FakeMachine(0.5), slow], 4)
    assert slow.pacing.is_slow
    assert slow.pacing.steps_for(9) == FULL
    assert slow.pacing.early_submit_policy(9).margin_seconds == GRACE


def test_rounds_that_tell_nothing_change_nothing() -> None:
    pacing = Pacing(GRACE, lambda number: FULL, TOKENS)
    pacing.record_steps(1, 1.0)
    pacing.record_steps(2, 2.0)
    made: list[list[int | None]] = [[None], [None, FULL], []]
    for number, offers in enumerate(made):
        pacing.open_round(number, 0.0)
        for steps in offers:
            pacing.record_submit(steps, 100.0)
        pacing.close_round({"one": 1.0, "another": 1.0}, ())
    pacing.open_round(3, 0.0)
    pacing.record_early_request(2.0)
    pacing.close_round({}, ())
    assert pacing.step_share == 1.0
    assert pacing.describe(4) == ""


def test_totals_that_went_back_are_those_of_a_trainer_that_started_again() -> None:
    pacing = Pacing(GRACE, lambda number: FULL, TOKENS)
    for step, seconds in ((10, 10.0), (11, 12.0), (3, 1.0), (4, 3.0)):
        pacing.record_steps(step, seconds)
    assert pacing.early_submit_policy(0).margin_seconds == pytest.approx(GRACE / 2), (
        "twice the 2 s of a step, but at most half the grace"
    )


def test_what_a_person_reads() -> None:
    slow = FakeMachine(0.4)
    rounds([FakeMachine(0.1), FakeMachine(0.1), slow], 8)
    assert slow.pacing.describe(8) == "10 of 40 steps per round: this machine is 4.0 times slower than the others"


@pytest.mark.parametrize("overlaps", [True, False])
def test_where_messages_overlap_with_training_no_steps_are_planned_away(overlaps: bool) -> None:
    made = rounds([*(FakeMachine(0.5, overlaps=overlaps) for _ in range(3)), FakeMachine(2.0, overlaps=overlaps)], 12)
    slow = [steps for *_, steps in made]
    assert all(steps == [FULL] * 3 for *steps, _ in made)
    assert (slow[-1] > FULL // 4 + 1) is overlaps, "the control: a slow machine's steps are planned"


AHEAD = 9


def overlapped_rounds(lead: int, count: int) -> list[float]:
    """Return the seconds for which each of four peers waits for the last of a round, from the second one on.

    They train on for nine steps of about a second while a contribution travels. The first started long before the rest.
    """
    every = [Pacing(GRACE, lambda number: AHEAD, TOKENS, lambda number: True, lambda number: lead) for _ in range(4)]
    now, made, total, waited = [0.0, *[4.0 * AHEAD] * 3], [0] * 4, [0] * 4, [0.0] * 4
    noise = random.Random(0)
    for number in range(count):
        sent: list[float] = []
        for me, pacing in enumerate(every):
            pacing.open_round(number, now[me])
            missing = max(0, pacing.steps_for(number) - made[me])
            now[me], total[me] = now[me] + missing + noise.uniform(0.0, 2.0), total[me] + missing
            pacing.record_steps(total[me], float(total[me]))
            pacing.record_submit(made[me] + missing, now[me])
            sent.append(now[me])
        for me, pacing in enumerate(every):
            made[me] = min(AHEAD, math.ceil(max(sent) - now[me]))
            now[me], total[me] = now[me] + made[me], total[me] + made[me]
            waited[me] += max(0.0, max(sent) - now[me]) if number else 0.0
            now[me] = max(now[me], max(sent))
            pacing.close_round({str(who): at for who, at in enumerate(sent) if who != me}, list("0123"))
    return waited


def test_who_leads_by_far_makes_more_steps_and_waits_no_more() -> None:
    """The control: otherwise it waits in each round in which another peer loses time."""
    assert overlapped_rounds(AHEAD, 12) == [0.0] * 4
    first, *others = overlapped_rounds(0, 12)
    assert first > 3.0 and others == [0.0] * 3


def test_who_leads_by_little_makes_the_plan_s_steps() -> None:
    pacing = Pacing(GRACE, lambda number: AHEAD, TOKENS, lambda number: True, lambda number: AHEAD)
    pacing.record_steps(1, 1.0)
    pacing.record_steps(2, 2.0)
    steps = {}
    for lead in (-3.0, 0.0, 4.0, 6.0, 9.0, 99.0):
        pacing.open_round(1, 0.0)
        pacing.record_submit(AHEAD, 10.0)
        pacing.close_round({"one": 1.0, "another": 10.0 + lead, "late": 200.0}, ["one", "another"])
        steps[lead] = pacing.steps_for(2)
    assert steps == {-3.0: AHEAD, 0.0: AHEAD, 4.0: AHEAD, 6.0: AHEAD + 2, 9.0: AHEAD + 4, 99.0: AHEAD + 4}


def test_who_has_time_for_less_than_a_step_reads_that_it_makes_one() -> None:
    pacing = Pacing(GRACE, lambda number: FULL, TOKENS)
    pacing.record_steps(1, 1.0)
    pacing.record_steps(2, 2.0)
    pacing.open_round(0, 0.0)
    pacing.record_early_request(2.0)
    pacing.close_round({"one": 0.0, "another": 0.0}, ())
    assert pacing.steps_for(1) == 1 and pacing.describe(1).startswith(f"1 of {FULL} steps per round")


@pytest.mark.parametrize("number", [0, 5])
def test_only_who_comes_into_a_run_that_goes_on_waits_for_no_half(number: int) -> None:
    """It is behind at first, perhaps, and opens a round that the others have ended."""
    pacing = FakeMachine(1.0).pacing
    for opened in (number, number + 1):
        pacing.open_round(opened, 0.0)
        assert pacing.early_submit_policy(opened).awaits_half == (opened == 0)
    pacing.close_round({}, [])
    pacing.open_round(number + 2, 10.0)
    assert pacing.early_submit_policy(number + 2).awaits_half
