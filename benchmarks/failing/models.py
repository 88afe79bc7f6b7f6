"""Data parallel training under the same deaths, in virtual time. PURE.

Both models are generous: gradients travel in no time, the group notices a death at once, a step is divided by speed so
that all peers end it together, and nothing is lost of what was saved. What is left is what a restart costs:

- synchronous: all peers are needed. A death stops the group until the dead peer is back; the work since the last
  checkpoint is lost.
- elastic: the peers that live go on without the dead. Each change of the group, a death or a return, restarts all
  workers, as torchrun does; every step before it is kept.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["synchronous", "elastic"]


@dataclass(frozen=True)
class Setting:
    """`rates`: tokens per second by peer. `share` of the peers die in each period, at moments that the seed draws, and
    are started again with the next one. `start`: seconds until a process that was started trains. `checkpoint`: seconds
    between two checkpoints of the synchronous group."""

    rates: Sequence[float]
    share: float
    period: float
    start: float
    checkpoint: float
    periods: int = 400
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """Tokens that count, over those of all processes that ran, and over those of processes that were ready to train;
    and the longest time in which no peer that lived made a step that counts."""

    of_all: float
    of_ready: float
    longest_stall: float


@dataclass(frozen=True)
class Span:
    """Of one process: `ready` is when it could train."""

    peer: int
    begun: float
    ready: float
    ended: float


def draw_lives(setting: Setting) -> list[Span]:
    """Return the life of each process, in no order."""
    chance, lives = random.Random(setting.seed), list[Span]()
    born = [(0.0, 0.0)] * len(setting.rates)  # begun, ready
    for number in range(1, setting.periods):
        began = number * setting.period
        deaths = int(setting.share * len(born) + chance.random())
        for victim in chance.sample(range(len(born)), min(deaths, len(born) - 1)):
            ended = began + setting.period * chance.random()
            begun, ready = born[victim]
            lives.append(Span(victim, begun, ready, ended))
            back = began + setting.period
            born[victim] = back, back + setting.start
    end = setting.periods * setting.period
    return lives + [Span(peer, begun, ready, max(begun, end)) for peer, (begun, ready) in enumerate(born)]


def simulate(kind: Kind, setting: Setting) -> Outcome:
    """Return what is left of the work of all peers."""
    lives, end = draw_lives(setting), setting.periods * setting.period
    moments = sorted({0.0, end, *(life.ended for life in lives), *(life.ready for life in lives)})
    tokens, stalled_until, since_checkpoint, last_useful, longest = 0.0, 0.0, 0.0, 0.0, 0.0
    deaths = {life.ended for life in lives if life.ended < end}
    for now, later in zip(moments, moments[1:], strict=False):
        if kind == "synchronous" and now in deaths:
            tokens, since_checkpoint = tokens - since_checkpoint, 0.0
        if kind == "elastic":
            stalled_until = now + setting.start if now else 0.0
        at_work = {life.peer: life for life in lives if life.ready <= now < life.ended}
        can_work = at_work and (kind == "elastic" or len(at_work) == len(setting.rates))
        seconds = max(0.0, later - max(now, stalled_until)) if can_work else 0.0
        made = seconds * sum(setting.rates[peer] for peer in at_work)
        tokens += made
        if seconds:
            longest = max(longest, later - seconds - last_useful)
            last_useful = later
            since_checkpoint = made * min(1.0, setting.checkpoint / seconds) if kind == "synchronous" else 0.0
    possible = sum(setting.rates[life.peer] * max(0.0, min(end, life.ended) - life.begun) for life in lives)
    ready = sum(setting.rates[life.peer] * max(0.0, min(end, life.ended) - life.ready) for life in lives)
    return Outcome(max(0.0, tokens) / possible, max(0.0, tokens) / ready, max(longest, end - last_useful))
