"""How much a peer remembers: the entries of all tables in its state machines."""

from typing import TYPE_CHECKING, Any

from node.loop.peers.catch_up import CatchUp
from node.loop.round_loop import RoundLoop
from node.loop.round_session import RoundSession
from protocol.consensus.knowledge import RoundKnowledge
from protocol.consensus.leader import Leader
from protocol.consensus.machine import RoundMachine
from protocol.consensus.messages.buffer import MessageBuffer
from protocol.consensus.quorum import VoterSet
from protocol.consensus.state import RoundState
from protocol.consensus.view import View
from protocol.recent import RecentTable
from tests.simulation.virtual.network import Scenario

if TYPE_CHECKING:
    from tests.simulation.virtual.peers import SimulatedPeer

MACHINES = (
    CatchUp, Leader, MessageBuffer, RoundKnowledge, RoundLoop, RoundMachine, RoundSession, RoundState, View, VoterSet
)  # fmt: skip
TABLES = (dict, set, list, RecentTable)


def count_entries(peer: "SimulatedPeer") -> int:
    return _count_entries(peer.loop, set())


def max_entries(scenario: Scenario) -> int:
    """Some tables hold an entry a peer, some one a peer and part, and of both kinds there are a few a view."""
    return 60 + 40 * (scenario.peers + scenario.strangers) * (2 + scenario.parts)


def _count_entries(value: Any, counted: set[int]) -> int:
    """Each table once, however many machines share it."""
    if id(value) in counted:
        return 0
    if isinstance(value, MACHINES):
        counted.add(id(value))
        return sum(_count_entries(field, counted) for field in vars(value).values())
    if isinstance(value, TABLES):
        counted.add(id(value))
        inner = value.values() if isinstance(value, dict | RecentTable) else ()
        return len(value) + sum(_count_entries(entry, counted) for entry in inner if isinstance(entry, TABLES))
    return 0
