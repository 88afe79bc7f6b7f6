"""Deliberate bugs in the machines of a pipeline, each with the word by which the seeds show it."""

from collections.abc import Callable

import pytest

from protocol.pipeline import microbatch_table, server, server_events
from protocol.pipeline.messages import Key, Outcome
from protocol.pipeline.microbatch import OwnedMicrobatch, Request
from protocol.pipeline.microbatch_table import Entry, MicrobatchTable, OpenStep
from protocol.pipeline.owner import Owner, Releases
from protocol.pipeline.owner_events import AskFailed
from protocol.pipeline.routing import Router
from protocol.pipeline.server import StageServer

Bug = Callable[[pytest.MonkeyPatch], None]


def asks_another_peer_after_a_timeout(patch: pytest.MonkeyPatch) -> None:
    """What the pipelines before us do."""

    def on_failure(self: Owner, event: AskFailed, now: float) -> None:
        found = self._find(event.peer, event.task)
        if found is not None:
            found[0].forget_server(found[1].stage_pass, event.peer)
            self._routers[found[1].stage_pass.stage].record_failure(event.peer, now)
            self._go_elsewhere(found[0], found[1], now)

    patch.setattr(Owner, "_on_failure", on_failure)


def reserves_nothing_for_backwards(patch: pytest.MonkeyPatch) -> None:
    """Servers keep microbatches as long as owners ask, too: their own deadline would end a deadlock."""
    patch.setattr(microbatch_table.Memory, "forward_capacity", property(lambda self: self.capacity))
    patch.setattr(microbatch_table, "MIN_KEPT_SECONDS", float("inf"))


def waits_for_dead_owners(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StageServer, "_on_owners", lambda self, owners: None)
    patch.setattr(StageServer, "next_deadline", lambda self: None)


def waits_for_earlier_processes_of_owners(patch: pytest.MonkeyPatch) -> None:
    """What an owner began before it restarted stays until its deadline."""
    on_owners = StageServer._on_owners

    def forget_starts(self: StageServer, event: server_events.OwnersChanged) -> None:
        on_owners(self, server_events.OwnersChanged(dict.fromkeys(event.owners, 0)))

    patch.setattr(StageServer, "_on_owners", forget_starts)


def forgets_to_release(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Releases, "add", lambda self, stage, peer, serials, now: None)
    patch.setattr(StageServer, "next_deadline", lambda self: None)


def forgets_to_release_at_servers_that_seem_gone(patch: pytest.MonkeyPatch) -> None:
    leave = Owner._leave_gone_peers

    def forget(self: Owner, microbatch: OwnedMicrobatch, now: float) -> None:
        leave(self, microbatch, now)
        microbatch.left.clear()

    patch.setattr(Owner, "_leave_gone_peers", forget)


def loses_gradients_of_struck_microbatches(patch: pytest.MonkeyPatch) -> None:
    """A ledger that counts only what the server still waits for."""
    add = OpenStep.add
    patch.setattr(OpenStep, "add", lambda self, key: add(self, key) if key in self._open else None)


def keeps_outcomes_of_an_earlier_life(patch: pytest.MonkeyPatch) -> None:
    restart = StageServer._on_restart

    def on_restart(self: StageServer, event: server_events.TrainerRestarted, now: float) -> None:
        earlier = {id(work): work.outcome for entry in self.table.entries.values() for work in entry.work.values()}
        restart(self, event, now)
        for entry in self.table.entries.values():
            for work in entry.work.values():
                work.outcome = earlier[id(work)]

    patch.setattr(StageServer, "_on_restart", on_restart)


def never_gives_up_a_bad_microbatch(patch: pytest.MonkeyPatch) -> None:
    def react(self: Owner, microbatch: OwnedMicrobatch, request: Request, now: float) -> None:
        self._go_elsewhere(microbatch, request, now)

    patch.setattr(Owner, "_on_refusal", react)


def believes_that_a_lost_input_comes_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OwnedMicrobatch, "_miss", lambda self, request, name: None)


def weighs_peers_by_round_trips(patch: pytest.MonkeyPatch) -> None:
    """Rates from the time between a request and its outcome, as in SWARM: the same number in flight at each peer."""
    on_outcome = Owner._on_expected_outcome

    def with_latency(self: Owner, microbatch: OwnedMicrobatch, request: Request, outcome: Outcome, now: float) -> None:
        route = self._routers[request.stage_pass.stage]._find(request.peer)
        if route is not None:
            route.reported += 0.1 * (1 / (now - request.opened) - route.reported)
        on_outcome(self, microbatch, request, outcome, now)

    patch.setattr(Router, "record_rate", lambda self, peer, rate: None)
    patch.setattr(Owner, "_on_expected_outcome", with_latency)


def invites_nobody(patch: pytest.MonkeyPatch) -> None:
    """Let owners that found a server busy ask again and again, and let any number of forwards queue at a server."""
    patch.setattr(microbatch_table.WaitingOwners, "invite", lambda self, places, last=(): [])
    patch.setattr(server, "UNINVITED_PAUSE_MS", 200)
    patch.setattr(server, "QUEUE_SECONDS", 1e6)


def frees_what_a_trainer_reads(patch: pytest.MonkeyPatch) -> None:
    """A slot of a microbatch that is given up while the trainer computes gets other bytes at once."""

    def free(self: MicrobatchTable, key: Key) -> None:
        entry = self.entries.get(key, Entry(0.0))
        self.memory.shrink(key, entry.size)
        self.actions.append(server_events.Drop(key, entry.blobs()))

    patch.setattr(MicrobatchTable, "free", free)


def forgets_the_deadlines_of_owners(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Owner, "next_deadline", lambda self: None)


BUGS: list[tuple[Bug, str, int]] = [  # with the seed from which to search
    (asks_another_peer_after_a_timeout, "twice", 0),
    (reserves_nothing_for_backwards, "deadlock", 0),
    (waits_for_dead_owners, "still holds", 0),
    (waits_for_earlier_processes_of_owners, "earlier process", 155),
    (forgets_to_release, "deadlock", 0),
    (forgets_to_release_at_servers_that_seem_gone, "after its end", 91),
    (loses_gradients_of_struck_microbatches, "differs", 0),
    (keeps_outcomes_of_an_earlier_life, "deadlock", 0),
    (never_gives_up_a_bad_microbatch, "deadlock", 0),
    (believes_that_a_lost_input_comes_back, "deadlock", 0),
    (forgets_the_deadlines_of_owners, "missed a deadline", 0),
    (frees_what_a_trainer_reads, "without its inputs", 218),
]
