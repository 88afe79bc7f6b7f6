"""The chain follower with peers that hold the chain, hold too little of it, or lie."""

from collections.abc import Callable

import grpc
import pytest

from node.daemon.peers import chain_sync
from node.dashboard import chain_follower as module
from node.dashboard.chain_follower import ChainFollower, find_diverged, known_head, prove_chain
from node.dashboard.events import ChainForked, LoggedEvent, RoundCommitted, RoundsMissing
from node.dashboard.state import RunState
from protocol.blobs.blob import Blob
from protocol.consensus.chain import Chain, ChainHead, ChainLog, genesis_head
from protocol.consensus.messages.contributions import MAX_PARTS, ContributionLimits
from protocol.errors import MalformedError, UnreachableError
from protocol.murmur_pb2 import ChainReply, PeerRecord
from tests.node.dashboard.example_events import OPENED, apply_all, joined
from tests.node.small_run import PEERS, RUN_ID, SHAPES, certified, commit_of

LIMITS = ContributionLimits("diloco", SHAPES.hash(), MAX_PARTS, 1 << 40, 1 << 40)
NAMES = [identity.peer_id for identity in PEERS]
ME = NAMES[0]


class FakeChainPeer:
    """One peer's chain; it keeps the last `kept` commits, and answers with `lies` if set."""

    def __init__(self, kept: int = 64) -> None:
        self.chain = Chain.from_genesis(RUN_ID)
        self.kept = kept
        self.lies: ChainLog | None = None
        self.silent = False

    def grow(self, rounds: int, word: str = "") -> "FakeChainPeer":
        for _ in range(rounds):
            blob = Blob.of(f"{word}{self.chain.round}".encode())
            self.chain.append(certified(self.chain, commit_of(self.chain.head, {1: blob, 2: blob})))
        return self

    def record(self) -> PeerRecord:
        head = self.chain.head
        return PeerRecord(role="trainer", round=head.round, digest=head.digest, chain_tokens=head.tokens)

    def answer(self, after: int) -> ChainReply:
        if self.silent:
            raise UnreachableError("it does not answer")
        head, oldest = self.chain.head, max(0, self.chain.round - self.kept)
        log = self.lies or self.chain.log
        log = log.since(min(max(after, oldest), head.round)) if log.commits else log
        page = ChainLog(log.electorate, log.commits[:10])
        return ChainReply(log=page.to_wire(), round=head.round, digest=head.digest, chain_tokens=head.tokens)


Network = dict[str, FakeChainPeer]


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    peers: Network = {}

    async def ask(run_id: str, channel: Callable[[str], object], peer: str, after: int) -> ChainReply:
        return peers[peer].answer(after)

    monkeypatch.setattr(chain_sync, "request_chain", ask)
    return peers


def make_follower() -> ChainFollower:
    return ChainFollower(RUN_ID, LIMITS, lambda peer: grpc.aio.insecure_channel("unix:nowhere"))


async def fetch_new_events(
    follower: ChainFollower, network: Network, state: RunState, now: float = 100.0
) -> list[LoggedEvent]:
    known = known_head(RUN_ID, state)
    believed = follower.find_trusted_head(known, {peer: log.record() for peer, log in network.items()}, now)
    steps = [] if believed is None else await follower.fetch_steps(known, *believed, now)
    return follower.build_events(state, steps, now) if steps else []


def rounds(events: list[LoggedEvent]) -> list[int]:
    return [event.round for event in events if isinstance(event, RoundCommitted)]


async def test_follower_fetches_rounds_in_order(network: Network) -> None:
    network |= {NAMES[1]: FakeChainPeer().grow(25), NAMES[2]: FakeChainPeer().grow(25)}
    follower, state = make_follower(), apply_all([OPENED])
    first = await fetch_new_events(follower, network, state)
    assert rounds(first) == list(range(25))
    assert [event.at for event in first if isinstance(event, RoundCommitted)] == [None] * 24 + [100.0]
    state = apply_all(first, state)
    assert known_head(RUN_ID, state) == network[NAMES[1]].chain.head
    for log in network.values():
        log.grow(2)
    second = await fetch_new_events(follower, network, state, 101.0)
    assert rounds(second) == [25, 26] and all(
        event.at == 101.0 for event in second if isinstance(event, RoundCommitted)
    )
    assert await fetch_new_events(follower, network, apply_all(second, state)) == []


async def test_host_that_was_away_has_no_gap_while_logs_reach_back(network: Network) -> None:
    network[NAMES[1]] = FakeChainPeer().grow(5)
    state = apply_all(await fetch_new_events(make_follower(), network, apply_all([OPENED])), apply_all([OPENED]))
    network[NAMES[1]].grow(50)
    again = apply_all(await fetch_new_events(make_follower(), network, state), state)
    assert [row.round for row in again.rows] == list(range(55)) and again.missing_rounds == 0


@pytest.mark.parametrize("kept", [1, 7, 20, 64])
async def test_rounds_in_no_log_are_recorded_as_missing(network: Network, kept: int) -> None:
    network[NAMES[1]] = FakeChainPeer().grow(5)
    state = apply_all(await fetch_new_events(make_follower(), network, apply_all([OPENED])), apply_all([OPENED]))
    network[NAMES[1]].kept = kept
    network[NAMES[1]].grow(100)
    events = await fetch_new_events(make_follower(), network, state)
    assert isinstance(events[0], RoundsMissing) and (events[0].first, events[0].last) == (5, rounds(events)[0] - 1)
    assert rounds(events) == list(range(rounds(events)[0], 105)) and len(rounds(events)) > kept // 2
    assert known_head(RUN_ID, apply_all(events, state)) == network[NAMES[1]].chain.head


async def test_fork_replaces_only_the_rounds_after_it(network: Network) -> None:
    mine, theirs = FakeChainPeer().grow(6), FakeChainPeer().grow(6)
    network[NAMES[1]] = mine.grow(3, "mine")
    state = apply_all(await fetch_new_events(make_follower(), network, apply_all([OPENED])), apply_all([OPENED]))
    network.clear()
    network[NAMES[2]] = theirs.grow(5, "theirs")
    events = await fetch_new_events(make_follower(), network, state)
    assert isinstance(events[0], ChainForked) and events[0].round == 6 and rounds(events) == list(range(6, 11))
    after = apply_all(events, state)
    assert [row.round for row in after.rows] == list(range(11))
    assert known_head(RUN_ID, after) == theirs.chain.head


async def test_single_peer_among_three_cannot_invent_rounds(network: Network) -> None:
    """Control: a peer that is alone is trusted, because there is no other chain."""
    liar = FakeChainPeer().grow(30, "lie")
    network |= {NAMES[1]: FakeChainPeer().grow(4), NAMES[2]: FakeChainPeer().grow(4), NAMES[3]: liar}
    events = await fetch_new_events(make_follower(), network, apply_all([OPENED]))
    assert rounds(events) == [0, 1, 2, 3]
    assert known_head(RUN_ID, apply_all(events)) == network[NAMES[1]].chain.head
    assert len(rounds(await fetch_new_events(make_follower(), {NAMES[3]: liar}, apply_all([OPENED])))) == 30


async def test_heads_without_proof_do_not_hide_the_honest_head(network: Network) -> None:
    honest, liar = FakeChainPeer().grow(4), FakeChainPeer().grow(30, "lie")
    liar.lies = ChainLog(liar.chain.log.electorate)
    network |= {NAMES[0]: honest, NAMES[1]: honest, NAMES[2]: liar, NAMES[3]: liar}
    follower, state = make_follower(), apply_all([OPENED])
    assert await fetch_new_events(follower, network, state, 100.0) == [], "more tokens, vouched for by two"
    assert rounds(await fetch_new_events(follower, network, state, 100.5)) == [0, 1, 2, 3]
    liar.lies = None
    later = 100.5 + module.AVOID_SECONDS
    assert len(rounds(await fetch_new_events(follower, network, state, later))) == 30, "it is asked again"


async def test_absurdly_high_head_costs_no_memory(network: Network) -> None:
    log = FakeChainPeer().grow(1)
    network[NAMES[1]] = log
    target = ChainHead(2**60, log.chain.digest, 2**40)
    assert await make_follower().fetch_steps(genesis_head(RUN_ID), target, [NAMES[1]], 1.0) == []


async def test_host_that_trains_alone_follows_its_own_chain(network: Network) -> None:
    """Control: a host cannot ask itself over the network."""
    own = FakeChainPeer().grow(5)
    follower = ChainFollower(RUN_ID, LIMITS, lambda peer: grpc.aio.insecure_channel("unix:nowhere"), {ME: own.chain})
    assert rounds(await fetch_new_events(follower, {ME: own}, apply_all([OPENED]))) == list(range(5))
    own.silent, network[ME] = True, own
    assert await fetch_new_events(make_follower(), network, apply_all([OPENED])) == []


async def test_commits_off_the_trusted_head_are_rejected_and_another_peer_is_asked(network: Network) -> None:
    honest, liar = FakeChainPeer().grow(4), FakeChainPeer().grow(4)
    liar.lies = FakeChainPeer().grow(4, "lie").chain.log
    first, second = sorted(NAMES[1:3])
    network |= {first: liar, second: honest}
    events = await fetch_new_events(make_follower(), network, apply_all([OPENED]))
    assert rounds(events) == [0, 1, 2, 3]
    assert known_head(RUN_ID, apply_all(events)) == honest.chain.head
    honest.silent = True
    assert await fetch_new_events(make_follower(), network, apply_all([OPENED])) == []


async def test_rounds_that_the_state_knows_already_are_not_recorded_twice(network: Network) -> None:
    """The commits reach further back than the events when a partial record was cut off the commit log."""
    log = network[NAMES[1]] = FakeChainPeer().grow(6)
    follower, state = make_follower(), apply_all([OPENED])
    state = apply_all(await fetch_new_events(follower, network, state), state)
    log.grow(1)
    steps = await follower.fetch_steps(genesis_head(RUN_ID), log.chain.head, [NAMES[1]], 101.0)
    assert len(steps) == 7
    assert rounds(follower.build_events(state, steps, 101.0)) == [6]
    assert follower.build_events(state, steps[:6], 101.0) == []


def test_proof_requires_digests_order_and_tokens() -> None:
    log = FakeChainPeer().grow(3)
    whole, head = log.chain.log, log.chain.head
    assert [step.after.round for step in prove_chain(whole, head)] == [1, 2, 3]
    wrong = [
        (whole, ChainHead(head.round, bytes(32), head.tokens)),
        (whole, ChainHead(head.round, head.digest, 10)),
        (ChainLog(whole.electorate, (whole.commits[0], whole.commits[2])), head),
        (ChainLog(whole.electorate, whole.commits[:2]), head),
    ]
    for given, target in wrong:
        with pytest.raises(MalformedError):
            prove_chain(given, target)


async def test_peer_that_contributed_before_but_not_now_is_late(network: Network) -> None:
    network[NAMES[1]] = FakeChainPeer().grow(1)
    follower, state = make_follower(), apply_all([OPENED, joined(NAMES[1]), joined(NAMES[2]), joined(NAMES[3])])
    state = apply_all(await fetch_new_events(follower, network, state), state)
    log = network[NAMES[1]].chain
    log.append(certified(log, commit_of(log.head, {1: Blob.of(b"alone")})))
    (event,) = await fetch_new_events(follower, network, state, 101.0)
    assert isinstance(event, RoundCommitted) and event.late == (NAMES[2],)  # the fourth never contributed


def test_peer_with_a_minority_state_has_diverged() -> None:
    def make_record(state: bytes, digest: bytes = b"d" * 32) -> PeerRecord:
        return PeerRecord(round=4, digest=digest, state_digest=state * 32)

    assert find_diverged({"a": make_record(b"x"), "b": make_record(b"x"), "c": make_record(b"y")}) == [("c", 4)]
    assert find_diverged({"a": make_record(b"x"), "b": make_record(b"y")}) == []
    assert find_diverged({"a": make_record(b"x"), "b": make_record(b"y"), "c": make_record(b"z")}) == []
    assert find_diverged({"a": make_record(b"x"), "b": make_record(b"x"), "c": make_record(b"y", b"e" * 32)}) == []


def test_peers_at_the_genesis_head_are_not_followed() -> None:
    start = genesis_head(RUN_ID)
    record = PeerRecord(role="trainer", round=0, digest=start.digest)
    trainers = {NAMES[1]: record, NAMES[2]: PeerRecord(role="trainer")}
    assert make_follower().find_trusted_head(start, trainers, 1.0) is None
