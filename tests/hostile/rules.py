"""The rules of honest peers that a control turns off, by name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from node.daemon import replica
from node.daemon.state import outer_state
from node.monitoring.peer_lines import LineLimit
from protocol.consensus import fork_choice, machine
from protocol.consensus.messages import contributions as messages
from protocol.membership.known_peers import CheckQuota, KnownPeers, NewcomerQuota
from protocol.transport import connection_supervisor
from protocol.transport.call_guard import CallGuard
from protocol.transport.connection_supervisor import ConnectionSupervisor
from tests.hostile.patches import replaced
from tests.hostile.switches import Switches

UNBOUNDED_TOKENS = 1 << 40


def install_rules(switches: Switches) -> None:
    """Turn off the rules whose switches are on when the process starts."""
    for name, turn_off in RULES.items():  # "room" and "manifest-bounds" are those of `manifests`
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


RULES: dict[str, Callable[[], None]] = {
    "certificates": _take_any_certificate,
    "known-contributors": _know_all_contributors,
    "bounded-tokens": _take_any_tokens,
    "confirmed-keys": _confirm_every_key,
    "newcomer-quota": _take_all_newcomers,
    "flood-limits": _take_floods,
    "call-guard": lambda: _always(CallGuard, "charge", None),
    "log-limit": lambda: _always(LineLimit, "admits", True),
}
