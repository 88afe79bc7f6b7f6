"""Try an attack: a clean phase, the attack and its aftermath, and the same against peers without the rule."""

import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.hostile.arena import Arena, small_manifest
from tests.hostile.attacks import Attack
from tests.hostile.scoreboard import (
    Result,
    Score,
    Window,
    are_digests_equal,
    mean_loss,
    slowest_pace,
)
from tests.hostile.template import Template
from tests.swarm.process_swarm import isolated_processes

CLEAN_SECONDS = 3.0
AFTER_SECONDS = 2.0
SETTLE_SECONDS = 0.5
CONTROL_SECONDS = 20.0


@contextmanager
def open_arena(template: Template, attack: Attack) -> Iterator[Arena]:
    with isolated_processes(), tempfile.TemporaryDirectory(prefix="mmh", dir="/tmp") as folder:
        arena = Arena(template, Path(folder) / "r", small_manifest(**attack.changes), attack.member)
        try:
            yield arena
        finally:
            arena.close()


def try_attack(template: Template, attack: Attack, rules_off: Sequence[str] = (), until_ruin: bool = False) -> Score:
    """Attack a fresh swarm; `until_ruin` ends the attack once it has done harm that noise cannot."""
    with open_arena(template, attack) as arena:
        arena.start(rules_off)
        clean = _pass(CLEAN_SECONDS)
        before = arena.counters()
        began = time.monotonic()
        _begin(arena, attack)
        started = time.monotonic()
        while True:
            attacked = _pass(attack.seconds) if not until_ruin else _pass(1.0)
            score = _score(arena, clean, Window(started, attacked.end), before)
            if not until_ruin or score.is_ruined(attack.limits) or time.monotonic() - started > CONTROL_SECONDS:
                break
        if not until_ruin:
            _end(arena, attack)
            after = _pass(AFTER_SECONDS)
            score = _score(arena, clean, Window(started, attacked.end), before, after)
        del began
        return score


def _begin(arena: Arena, attack: Attack) -> None:
    if attack.member:
        assert arena.member is not None
        arena.member.switch_on(attack.switch or attack.name)
    if attack.stranger:
        arena.start_strangers(f"tests.hostile.{attack.stranger}", **attack.options)


def _end(arena: Arena, attack: Attack) -> None:
    if arena.member is not None:
        arena.member.switch_on()
    arena.stop_strangers()


def _pass(seconds: float) -> Window:
    start = time.monotonic()
    time.sleep(seconds)
    return Window(start, time.monotonic())


def _score(
    arena: Arena,
    clean: Window,
    attacked: Window,
    before: Mapping[str, int],
    after: Window | None = None,
) -> Score:
    rounds = arena.rounds()
    last = Window(attacked.end - 2.0, (after or attacked).end)
    whole = Window(attacked.start, (after or attacked).end)
    clean_pace = slowest_pace(rounds, [clean])
    counters = arena.counters()
    counters.subtract(before)
    return Score(
        loss_ratio=mean_loss(rounds, last) / mean_loss(rounds, clean),
        pace_ratio=slowest_pace(rounds, [attacked]) / clean_pace,
        digests_equal=are_digests_equal(rounds, whole),
        counters=dict(sorted((+Counter(counters)).items())),
        facts=arena.facts(),
    )


def run_attack(template: Template, attack: Attack) -> Result:
    """Try an attack, and then its control."""
    score = try_attack(template, attack)
    control = try_attack(template, attack, attack.rules, until_ruin=True)
    return Result(
        attack=attack.name,
        loss_ratio=score.loss_ratio,
        pace_ratio=score.pace_ratio,
        digests_equal=score.digests_equal,
        counted=any(score.counters.get(name, 0) for name in attack.counters),
        control_succeeds=control.is_ruined(attack.limits),
        counters=score.counters,
        facts=score.facts,
        control={"loss_ratio": control.loss_ratio, "pace_ratio": control.pace_ratio,
                 "digests_equal": control.digests_equal},
        defended=not score.is_harmed(attack.min_pace, attack.limits),
    )  # fmt: skip
