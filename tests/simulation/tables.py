"""How much a peer remembers: the entries of all tables in its state machines."""

from typing import TYPE_CHECKING, Any

from protocol.rounds.attendance import Attendance
from protocol.rounds.election import Electorate
from protocol.rounds.evidence import Evidence
from protocol.rounds.leadership import Leadership
from protocol.rounds.round import Round
from protocol.rounds.state import RoundState
from protocol.rounds.view import View
from tests.simulation.network import Scenario

if TYPE_CHECKING:
    from tests.simulation.peers import Peer

MACHINES = (Attendance, Electorate, Evidence, Leadership, Round, RoundState, View)
TABLES = (dict, set, list)


def entries_of(peer: "Peer") -> int:
    return _entries(peer.round, set()) + _entries(peer.attendance, set())


def most_entries(scenario: Scenario) -> int:
    """Some tables hold an entry a peer, some one a peer and part, and of both kinds there are a few a view."""
    return 60 + 40 * scenario.peers * (2 + scenario.parts)


def _entries(value: Any, counted: set[int]) -> int:
    """Each table once, however many machines share it."""
    if id(value) in counted:
        return 0
    if isinstance(value, MACHINES):
        counted.add(id(value))
        return sum(_entries(field, counted) for field in vars(value).values())
    if isinstance(value, TABLES):
        counted.add(id(value))
        inner = value.values() if isinstance(value, dict) else ()
        return len(value) + sum(_entries(entry, counted) for entry in inner if isinstance(entry, TABLES))
    return 0
