"""Turn errors that a stranger can cause into refusals, so that they end no node and leave no server waiting.

A peer chooses the tasks, outcomes and blobs that it sends, so it also chooses which lines of this node they reach. An
error there is refused and counted like any other fault of that peer; the log has its trace, because it is our bug too.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from node.loop.stage_events import StageEvent, StatementReceived, TaskAsked
from protocol.errors import MalformedError, PeerFault
from protocol.identity import PeerId
from protocol.membership.directory import PeerDirectory
from protocol.pipeline import owner_events, server_events

logger = logging.getLogger(__name__)


@contextmanager
def refusing_errors(recorder: PeerDirectory, maker: PeerId | None) -> Iterator[None]:
    """Refuse an error inside, and count it against the peer whose bytes caused it; without one, raise it."""
    try:
        yield
    except Exception as error:
        if maker is None:
            raise
        recorder.record_refusal(maker, as_fault(error))


def as_fault(error: Exception) -> PeerFault:
    """Return a peer's fault unchanged, and any other error as one, with its trace in the log."""
    if isinstance(error, PeerFault):
        return error
    logger.error("the message of a peer caused an error", exc_info=error)
    return MalformedError(f"it causes an error ({type(error).__name__})")


def maker_of(event: StageEvent) -> PeerId | None:
    """Return the peer whose bytes an event carries, or whose task it continues; None for events of this node."""
    match event:
        case TaskAsked(task):
            return task.owner
        case owner_events.Answered() | owner_events.AskFailed() | owner_events.OutcomeReceived():
            return event.peer
        case owner_events.Invited() | owner_events.ReleaseFailed() | owner_events.Probed() | StatementReceived():
            return event.peer
        case server_events.ReleasedBy():
            return event.owner
        case server_events.InputsFetched() | server_events.InputMissing() | server_events.Computed():
            return event.key.owner
    return None
