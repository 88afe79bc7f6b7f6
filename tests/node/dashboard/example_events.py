"""The events of a small run, for tests of the dashboard."""

from collections.abc import Iterable

from node.dashboard.events import (
    CommittedContribution,
    DashboardEvent,
    LoggedEvent,
    LogOpened,
    PeerAppeared,
    PeerReport,
    PeerTiming,
    RoundCommitted,
    RoundTimed,
    RunFacts,
)
from node.dashboard.state import RunState, apply_event
from protocol.identity import Identity

NAMES = sorted(Identity.create().peer_id for _ in range(4))
FACTS = RunFacts(
    run="small",
    run_id="ab" * 32,
    recipe="diloco",
    parameters=1000,
    batch_tokens=10,
    min_peers=2,
    target_rounds=100,
    organiser=NAMES[0],
    expiry=5.0,
)
OPENED = LogOpened(at=1000.0, facts=FACTS)


def peer_report(peer: str, **fields: object) -> PeerReport:
    return PeerReport.model_validate({"peer": peer, "role": "trainer", "tokens_per_second": 50.0, **fields})


def joined(peer: str, at: float = 1000.0, **fields: object) -> PeerAppeared:
    return PeerAppeared(at=at, now=peer_report(peer, **fields))


def committed(
    number: int, givers: Iterable[str] = NAMES[:2], late: Iterable[str] = (), at: float | None = -1.0, loss: float = 3.0
) -> RoundCommitted:
    given = tuple(
        CommittedContribution(peer=peer, tokens=100, steps=10, loss=loss, size=500) for peer in sorted(givers)
    )
    return RoundCommitted(
        at=1010.0 + 2 * number if at == -1.0 else at,
        round=number,
        base=f"{number:064x}",
        digest=f"{number + 1:064x}",
        tokens=(number + 1) * 100 * len(given),
        given=given,
        late=tuple(late),
    )


def timed(number: int, sent: int = 1000, peers: Iterable[str] = NAMES[:2]) -> RoundTimed:
    lanes = tuple(PeerTiming(peer=peer, compute=1.0, exchange=0.25, wait=0.5, sent=sent) for peer in peers)
    return RoundTimed(at=1012.0 + 2 * number, round=number, lanes=lanes)


def opening_events() -> list[LoggedEvent]:
    return [OPENED, joined(NAMES[0]), joined(NAMES[1])]


def apply_all(events: Iterable[DashboardEvent], state: RunState | None = None) -> RunState:
    state = state or RunState()
    for event in events:
        state = apply_event(state, event)
    return state
