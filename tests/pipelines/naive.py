"""Naive variants of the machines, one for each defence: with one of them a test of faults must fail.

`HOSTILE` has the variants of peers that attack the others.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from node.daemon.stages.activations import ActivationStore
from node.daemon.stages.calls import StageCalls
from node.daemon.stages.stage_effects import OWN, StageEffects
from protocol.blobs.blob import Blob
from protocol.errors import UnreachableError
from protocol.identity import PeerId
from protocol.pipeline import server_events
from protocol.pipeline.messages import MAX_DEADLINE_MS, Answer, Key, Task
from protocol.pipeline.microbatch import EndedMicrobatches, OwnedMicrobatch
from protocol.pipeline.microbatch_table import FatalTasks, OpenStep
from protocol.pipeline.owner import Owner
from protocol.pipeline.server import StageServer
from tests.pipelines.tally_trainer import FATAL
from tests.protocol.pipeline.virtual import attackers, bugs

Patch = Callable[[], None]


def _planted(bug: bugs.Bug) -> Patch:
    """Return the patch that plants a bug of the simulation in this process, for good."""
    return lambda: bug(pytest.MonkeyPatch())


def _trust_acknowledgements_of_the_dead() -> None:
    patch = pytest.MonkeyPatch()
    forget_peer = OwnedMicrobatch.forget_peer

    def forget(self: OwnedMicrobatch, peer: str) -> None:
        lost = set(self.lost)
        forget_peer(self, peer)
        self.lost = lost

    patch.setattr(OwnedMicrobatch, "forget_peer", forget)
    patch.setattr(OwnedMicrobatch, "record_life", lambda self, stage, peer, life: None)
    patch.setattr(EndedMicrobatches, "update", lambda self, stages: 0)


def _keep_the_ledger_of_a_dead_trainer() -> None:
    restart = StageServer._on_restart

    def on_restart(self: StageServer, event: server_events.TrainerRestarted, now: float) -> None:
        kept = self.steps.ledger | self.steps.open_step.added
        restart(self, server_events.TrainerRestarted(event.life, kept), now)

    pytest.MonkeyPatch().setattr(StageServer, "_on_restart", on_restart)


def _step_while_microbatches_are_under_way() -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(OpenStep, "places", property(lambda self: 64))
    patch.setattr(OpenStep, "is_complete", property(lambda self: self._count > 0))


def _leave_at_once() -> None:
    async def drain(self: StageEffects) -> None:
        pass

    pytest.MonkeyPatch().setattr(StageEffects, "drain", drain)


def _drop_microbatches_of_an_empty_stage() -> None:
    def note(self: Owner, stage: int, now: float) -> None:
        while self._waiting[stage] and not self._routers[stage]._routes:
            microbatch = self._microbatches.get(self._waiting[stage].pop(0))
            if microbatch is not None:
                self._end(microbatch, "refused", now)

    pytest.MonkeyPatch().setattr(Owner, "_note_emptiness", note)


def _compute_fatal_tasks_again() -> None:
    for name in ("record", "record_task"):
        pytest.MonkeyPatch().setattr(FatalTasks, name, lambda *_: False)


def _withhold_backwards() -> None:
    ask = StageCalls.ask

    async def ask_forwards(self: StageCalls, peer: PeerId, task: Task) -> Answer:
        if task.direction == "backward":
            raise UnreachableError("it does not want to")
        return await ask(self, peer, replace(task, deadline_ms=MAX_DEADLINE_MS))

    pytest.MonkeyPatch().setattr(StageCalls, "ask", ask_forwards)


def _compute_nothing_at_a_great_rate() -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(StageEffects, "_compute", lambda self, action: None)
    patch.setattr(StageServer, "rate", property(lambda self: 1e6))
    patch.setattr(StageServer, "_places", lambda self: 1000)


def _draw_fatal_tokens() -> None:
    publish = ActivationStore.publish

    def publish_other(self: ActivationStore, key: Key, slot: int) -> Blob:
        if key.owner == OWN:
            view = self.memory.slot(slot)
            view[:] = FATAL.encode().ljust(len(view), b"\0")
        return publish(self, key, slot)

    pytest.MonkeyPatch().setattr(ActivationStore, "publish", publish_other)


HOSTILE: Mapping[str, Patch] = {
    "withholds backwards": _withhold_backwards,
    "computes nothing at a great rate": _compute_nothing_at_a_great_rate,
    "draws fatal tokens": _draw_fatal_tokens,
}
NAIVE: Mapping[str, Patch] = {
    **HOSTILE,
    "computes fatal tasks again": _compute_fatal_tasks_again,
    "waits as long as owners ask": _planted(attackers.waits_as_long_as_owners_ask),
    "believes rates and waits for outcomes": _planted(attackers.believes_rates_and_waits_for_outcomes),
    "asks elsewhere at a timeout": _planted(bugs.asks_another_peer_after_a_timeout),
    "reserves nothing for backwards": _planted(bugs.reserves_nothing_for_backwards),
    "waits for dead owners": _planted(bugs.waits_for_dead_owners),
    "trusts acknowledgements of the dead": _trust_acknowledgements_of_the_dead,
    "keeps the ledger of a dead trainer": _keep_the_ledger_of_a_dead_trainer,
    "leaves at once": _leave_at_once,
    "steps while microbatches are under way": _step_while_microbatches_are_under_way,
    "drops microbatches of an empty stage": _drop_microbatches_of_an_empty_stage,
}
