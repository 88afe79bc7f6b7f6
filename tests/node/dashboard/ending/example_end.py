"""A small run from its first round to its target, as a host records it."""

from node.dashboard.events import (
    CommittedContribution,
    LoggedEvent,
    PeerDeparted,
    RoundCommitted,
    SampleGenerated,
    ValidationMeasured,
)
from tests.node.daemon.receipts.example_commits import MARY, THREE_PEERS, TOM, ZOE, Given
from tests.node.dashboard.example_events import OPENED, joined
from tests.node.small_run import PEERS

HOSTILE = "<img src=x onerror=alert(1)>"
NAMES = {MARY.peer_id: "mary", TOM.peer_id: HOSTILE, ZOE.peer_id: ""}
ROUNDS = len(THREE_PEERS)
SAMPLE = 'ello(name):\n    """Return <b>a greeting</b>."""\n    return f"hello {name}"\n'


def opened(target: int) -> LoggedEvent:
    facts = OPENED.facts.model_copy(update={"target_rounds": target, "target_tokens": None, "run": "prose-100m"})
    return OPENED.model_copy(update={"facts": facts})


def committed_round(number: int, given: Given, tokens_before: int) -> RoundCommitted:
    contributions = tuple(
        CommittedContribution(peer=PEERS[peer].peer_id, tokens=tokens, steps=5, loss=5.5 - number, size=400_000)
        for peer, (tokens, _) in given.items()
    )
    return RoundCommitted(
        at=1060.0 + 60 * number,
        round=number,
        base=f"{number:064x}",
        digest=f"{number + 1:064x}",
        tokens=tokens_before + sum(one.tokens for one in contributions),
        given=tuple(sorted(contributions, key=lambda one: one.peer)),
    )


def first_rounds(count: int, target: int = ROUNDS) -> list[LoggedEvent]:
    """Return the events of the first rounds of the run that THREE_PEERS describes."""
    events: list[LoggedEvent] = [opened(target)]
    events += [joined(peer, at=1001.0, name=name, device="cpu, 8 threads") for peer, name in NAMES.items()]
    tokens = 0
    for number, given in enumerate(THREE_PEERS[:count]):
        event = committed_round(number, given, tokens)
        tokens = event.tokens
        measured = ValidationMeasured(at=event.at or 0, peer=MARY.peer_id, round=number + 1, loss=5.162 - 0.9 * number)
        events += [event, measured]
    return events


def last_events() -> list[LoggedEvent]:
    """Return what happens after the target: a sample, two peers that leave, and one that falls silent."""
    return [
        SampleGenerated(at=1310.0, round=ROUNDS, prompt="def h", text=SAMPLE),
        PeerDeparted(at=1320.0, peer=MARY.peer_id, reason="left"),
        PeerDeparted(at=1321.0, peer=TOM.peer_id, reason="expired"),
        PeerDeparted(at=1322.0, peer=ZOE.peer_id, reason="unreachable"),
    ]


def finished_run() -> list[LoggedEvent]:
    return [*first_rounds(ROUNDS), *last_events()]
