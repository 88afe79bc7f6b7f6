"""Try an attack: a clean phase, the attack and its aftermath, and the same against peers without the rule."""

import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.hostile.arena import Arena, small_manifest
from tests.hostile.attacks import Attack
from tests.hostile.scoreboard import Result, Score, Window, are_digests_equal, mean_loss, slowest_pace
from tests.hostile.template import Template
from tests.swarm.process_swarm import isolated_processes

MIN_CONTROL_SECONDS, PACE_SECONDS = 4.0, 6.0  # less says nothing about the pace; what was longer ago, neither
LOSS_SECONDS = 2.0  # over which the losses at the end are averaged


@dataclass(frozen=True)
class Timing:
    """Seconds before the attack and after it, the longest control, and the share of the attack's own seconds."""

    clean: float = 3.0
    after: float = 2.0
    control: float = 20.0
    share: float = 1.0


@contextmanager
def open_arena(template: Template, attack: Attack, rules_off: Sequence[str] = ()) -> Iterator[Arena]:
    """Start a swarm that suits an attack, inside the context."""
    with isolated_processes(), tempfile.TemporaryDirectory(prefix="mmh", dir="/tmp") as folder:
        manifest = small_manifest(**attack.changes)
        arena = Arena(template, Path(folder) / "r", manifest, attack.member, attack.stages, attack.stage)
        try:
            arena.start(rules_off)
            yield arena
        finally:
            arena.close()


def attack_once(arena: Arena, attack: Attack, timing: Timing) -> Score:
    """Return how a swarm does during an attack and after it, compared with just before it."""
    clean = _pass(timing.clean)
    before = arena.counters()
    began = _begin(arena, attack, ())
    attacked = Window(began, _pass(timing.share * attack.seconds).end)
    _end(arena)
    after = _pass(timing.after)
    return _score(arena, clean, attacked, before, after)


def attack_until_ruin(arena: Arena, attack: Attack, timing: Timing) -> Score:
    """Attack until there is harm that no noise explains, or until the control has lasted too long."""
    clean = _pass(timing.clean)
    before = arena.counters()
    start = _begin(arena, attack, attack.rules)
    while True:
        second = _pass(1.0)
        if second.end - start < (attack.seconds if "trusted" in attack.limits else MIN_CONTROL_SECONDS):
            continue
        recent = _score(arena, clean, Window(max(start, second.end - PACE_SECONDS), second.end), before)
        score = replace(recent, foreign_rounds=arena.foreign_rounds(start))
        if score.is_ruined(attack.limits) or second.end - start > timing.control:
            return score


def _begin(arena: Arena, attack: Attack, rules_off: Sequence[str]) -> float:
    """Begin an attack, and return since when it goes on: a stranger has arrived, or the hostile node tells its lie."""
    if attack.member:
        assert arena.member is not None
        began = time.monotonic()
        arena.member.switch_on(attack.switch or attack.name)
        arena.wait_until_member_lies(attack.switch or attack.name)
        return began
    options = dict(attack.options) | {"rules_off": list(rules_off)}
    arena.start_strangers(f"tests.hostile.attackers.{attack.stranger}", options, attack.niceness)
    return time.monotonic()


def _end(arena: Arena) -> None:
    if arena.member is not None:
        arena.member.switch_on()
    arena.stop_strangers()


def _pass(seconds: float) -> Window:
    start = time.monotonic()
    time.sleep(seconds)
    return Window(start, time.monotonic())


def _score(
    arena: Arena, clean: Window, attacked: Window, before: Mapping[str, int], after: Window | None = None
) -> Score:
    rounds = arena.rounds()
    end = (after or attacked).end
    counters = arena.counters()
    counters.subtract(before)
    return Score(
        loss_ratio=mean_loss(rounds, Window(attacked.end - LOSS_SECONDS, end)) / mean_loss(rounds, clean),
        pace_ratio=slowest_pace(rounds, [attacked]) / max(1e-9, slowest_pace(rounds, [clean])),
        digests_equal=all(are_digests_equal(each, Window(attacked.start, end)) for each in arena.rounds_by_stage()),
        counters=dict(sorted((+Counter(counters)).items())),
        facts=arena.facts() | {"void": counters["setbacks: step void"]},
        foreign_rounds=arena.foreign_rounds(attacked.start),
    )


def try_attack(template: Template, attack: Attack, timing: Timing | None = None) -> Score:
    """Try an attack on a swarm of its own."""
    with open_arena(template, attack) as arena:
        return attack_once(arena, attack, timing or Timing())


def try_control(template: Template, attack: Attack, timing: Timing | None = None) -> Score:
    """Try an attack on a swarm of its own whose honest peers have its rules switched off."""
    with open_arena(template, attack, attack.rules) as arena:
        return attack_until_ruin(arena, attack, timing or Timing())


def run_attack(template: Template, attack: Attack) -> Result:
    """Try an attack, and then its control."""
    score = try_attack(template, attack)
    if score.is_harmed(attack.min_pace, attack.limits) and not score.is_harmed(0.0, attack.limits):
        score = try_attack(template, attack)  # only slow: another program may have taken the processors meanwhile
    control = try_control(template, attack)
    return Result(
        attack=attack.name,
        loss_ratio=score.loss_ratio,
        pace_ratio=score.pace_ratio,
        digests_equal=score.digests_equal,
        counted=attack.is_counted(score.counters),
        control_succeeds=control.is_ruined(attack.limits),
        counters=score.counters,
        facts=score.facts,
        control={
            "loss_ratio": control.loss_ratio,
            "pace_ratio": control.pace_ratio,
            "digests_equal": control.digests_equal,
            "facts": dict(control.facts),
        },
        defended=not score.is_harmed(attack.min_pace, attack.limits),
    )
