"""The rules of honest peers that a control turns off, by name."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from node.daemon import replica
from node.daemon.stages import stage_effects
from node.daemon.stages.stage_effects import StageEffects
from node.daemon.state import outer_state
from node.loop.stage_loop import StageLoop
from node.monitoring.peer_lines import LineLimit
from protocol.consensus import fork_choice, machine
from protocol.consensus.messages import contributions as messages
from protocol.membership.known_peers import CheckQuota, KnownPeers, NewcomerQuota
from protocol.pipeline.exact import OwnerProgress, StepDecisions
from protocol.pipeline.ledger import StepLedger
from protocol.pipeline.microbatch_table import MicrobatchTable
from protocol.pipeline.owner import Owner
from protocol.pipeline.server import StageServer
from protocol.transport import connection_supervisor
from protocol.transport.call_guard import CallGuard
from protocol.transport.connection_supervisor import ConnectionSupervisor
from tests.hostile.patches import replaced
from tests.hostile.switches import Switches
from tests.protocol.pipeline.virtual.attackers import waits_as_long_as_owners_ask

UNBOUNDED_TOKENS = 1 << 40


def install_rules(switches: Switches) -> None:
    """Turn off the rules whose switches are on when the process starts."""
    for (
        name,
        turn_off,
    ) in RULES.items():  # "room", "manifest-bounds" and "proof" are those of the victims of `manifests` and `models`
        if switches.is_on(name):
            turn_off()


def _always(owner: Any, name: str, value: Any) -> None:
    replaced(owner, name, lambda original, *arguments, **options: value)


def _know_all_contributors() -> None:
    _always(machine, "proposal_fault", None)
    _always(machine, "unknown_contributors", frozenset())


def _take_any_tokens() -> None:
    def limits(original: Any, *arguments: Any) -> messages.ContributionLimits:
        found: messages.ContributionLimits = original(*arguments)
        return replace(found, max_tokens=UNBOUNDED_TOKENS)

    replaced(replica, "contribution_limits", limits)
    for module in (messages, outer_state):
        replaced(module, "count_tokens", lambda original, claims: list(claims))


def _confirm_every_key() -> None:
    replaced(KnownPeers, "_origin_of", lambda original, *arguments: "itself")


def _take_all_newcomers() -> None:
    _always(NewcomerQuota, "try_take", True)
    _always(CheckQuota, "try_take", True)


def _take_floods() -> None:
    for name, value in (("STRANGERS_BYTES_PER_SECOND", 1e12), ("STREAM_BURST", 10**9), ("STREAMS_PER_SECOND", 1e9)):
        assert hasattr(connection_supervisor, name)
        setattr(connection_supervisor, name, value)
    _always(ConnectionSupervisor, "ban", None)
    _always(ConnectionSupervisor, "may_open_stream", True)


def _take_any_certificate() -> None:
    _always(fork_choice, "is_certified", True)
    _always(fork_choice, "_is_vouched", True)
    _always(fork_choice, "count_weakest", 0)  # so the branch with more tokens wins


def _let_tasks_end_the_node() -> None:
    """Backward passes take the inputs that they name, and an error that they cause is an error of the node."""

    @contextmanager
    def raising(original: Any, *arguments: Any) -> Iterator[None]:
        yield

    replaced(MicrobatchTable, "_with_inputs_of_forward", lambda original, self, task: task)
    replaced(stage_effects, "refusing_errors", raising)


def _believe_records_about_steps() -> None:
    """A step is void if any record says that a stage has decided so."""

    def see_peers(original: Any, self: StageEffects) -> None:
        decisions = self._record.decisions
        for record in self._node.admitted.records().values():
            if decisions is not None and record.stage and record.step_decided % 2:
                number = record.step_decided // 2
                decisions.note(record.stage - 1, number, False, StepLedger.full(decisions._count))
        original(self)

    def note(original: Any, self: StepDecisions, stage: int, number: int, is_complete: bool, lacking: Any) -> None:
        original(self, stage, number, is_complete and self._by_stage[stage].get(number, True), lacking)

    replaced(StageEffects, "_see_peers", see_peers)
    replaced(StepDecisions, "note", note)


def _let_announced_keys_own() -> None:
    """Each announced key owns its share of a step, and nobody takes over from it."""

    def use_peers(original: Any, self: StageLoop, now: float) -> None:
        self._seen = replace(self._seen, standing=None)
        original(self, now)

    replaced(StageLoop, "_use_peers", use_peers)
    _always(OwnerProgress, "passes_at", math.inf)


RULES: dict[str, Callable[[], None]] = {
    "certificates": _take_any_certificate,
    "known-contributors": _know_all_contributors,
    "bounded-tokens": _take_any_tokens,
    "confirmed-keys": _confirm_every_key,
    "newcomer-quota": _take_all_newcomers,
    "flood-limits": _take_floods,
    "call-guard": lambda: _always(CallGuard, "charge", None),
    "hostile-tasks": _let_tasks_end_the_node,
    "own-deadlines": lambda: waits_as_long_as_owners_ask(pytest.MonkeyPatch()),
    "forward-first": lambda: _always(StageServer, "_may_add", True),
    "certified-decisions": _believe_records_about_steps,
    "audited-results": lambda: _always(Owner, "_begin_audit", False),
    "owners-with-standing": _let_announced_keys_own,
    "log-limit": lambda: _always(LineLimit, "admits", True),
}
