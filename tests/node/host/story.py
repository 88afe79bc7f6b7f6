"""A small run as events, for tests of the host."""

from collections.abc import Iterable

from node.host.events import Committed, Durable, Event, Facts, Given, Joined, Lane, Opened, PeerNow, Timed
from node.host.state import State, apply
from protocol.identity import Identity

NAMES = sorted(Identity.create().peer_id for _ in range(4))
FACTS = Facts(
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
OPENED = Opened(at=1000.0, facts=FACTS)


def now_of(peer: str, **fields: object) -> PeerNow:
    return PeerNow.model_validate({"peer": peer, "role": "trainer", "tokens_per_second": 50.0, **fields})


def joined(peer: str, at: float = 1000.0, **fields: object) -> Joined:
    return Joined(at=at, now=now_of(peer, **fields))


def committed(
    number: int, givers: Iterable[str] = NAMES[:2], late: Iterable[str] = (), at: float | None = -1.0, loss: float = 3.0
) -> Committed:
    given = tuple(Given(peer=peer, tokens=100, steps=10, loss=loss, size=500) for peer in sorted(givers))
    return Committed(
        at=1010.0 + 2 * number if at == -1.0 else at,
        round=number,
        base=f"{number:064x}",
        digest=f"{number + 1:064x}",
        tokens=(number + 1) * 100 * len(given),
        given=given,
        late=tuple(late),
    )


def timed(number: int, sent: int = 1000, peers: Iterable[str] = NAMES[:2]) -> Timed:
    lanes = tuple(Lane(peer=peer, compute=1.0, exchange=0.25, wait=0.5, sent=sent) for peer in peers)
    return Timed(at=1012.0 + 2 * number, round=number, lanes=lanes)


def beginning() -> list[Durable]:
    return [OPENED, joined(NAMES[0]), joined(NAMES[1])]


def folded(events: Iterable[Event], state: State | None = None) -> State:
    state = state or State()
    for event in events:
        state = apply(state, event)
    return state
