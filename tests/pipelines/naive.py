"""Naive variants of the machines, one for each defence: with one of them a test of faults must fail."""

from collections.abc import Callable, Mapping

import pytest

from node.daemon.stages.stage_effects import StageEffects
from protocol.pipeline import server_events
from protocol.pipeline.microbatch import EndedMicrobatches, OwnedMicrobatch
from protocol.pipeline.microbatch_table import OpenStep
from protocol.pipeline.owner import Owner
from protocol.pipeline.server import StageServer
from tests.protocol.pipeline.virtual import bugs

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


NAIVE: Mapping[str, Patch] = {
    "asks elsewhere at a timeout": _planted(bugs.asks_another_peer_after_a_timeout),
    "reserves nothing for backwards": _planted(bugs.reserves_nothing_for_backwards),
    "waits for dead owners": _planted(bugs.waits_for_dead_owners),
    "trusts acknowledgements of the dead": _trust_acknowledgements_of_the_dead,
    "keeps the ledger of a dead trainer": _keep_the_ledger_of_a_dead_trainer,
    "leaves at once": _leave_at_once,
    "steps while microbatches are under way": _step_while_microbatches_are_under_way,
    "drops microbatches of an empty stage": _drop_microbatches_of_an_empty_stage,
}
