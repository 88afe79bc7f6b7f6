"""Events from changes of the peer directory."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from node.daemon.peers.admitted_peers import AdmittedPeers
from node.daemon.receipts.commit_file import CommitFileHeader
from node.dashboard.event_log import EventLog
from node.dashboard.events import ChainForked, DashboardEvent
from node.dashboard.swarm_watcher import (
    MAX_SHOWN_PEERS,
    NEWS_BURST,
    NEWS_PER_SECOND,
    ByteRate,
    SwarmWatcher,
    build_peer_report,
)
from protocol.consensus.chain import genesis_head
from protocol.consensus.messages.contributions import NOTHING_ADOPTED
from protocol.errors import StorageError
from protocol.manifest.run import Manifest
from protocol.manifest.sections import DataSection, ReinforcementSection, SourceSection
from protocol.membership.peer_table import MembershipEvent, MembershipListener, PeerLeft
from protocol.membership.record_fields import encode_source_losses
from protocol.murmur_pb2 import PeerRecord
from protocol.steering import RevisionLog
from tests.node.dashboard.example_events import OPENED, committed
from tests.node.small_run import MANIFEST, PEERS, RUN_ID, SHAPES, admitted_of

HEADER = CommitFileHeader(RUN_ID, "diloco", SHAPES.hash())

ME, ADA, BOB = (identity.peer_id for identity in PEERS[:3])


@dataclass
class FakeDirectory:
    records: dict[str, PeerRecord] = field(default_factory=dict)
    callbacks: list[Callable[[MembershipEvent], None]] = field(default_factory=list)

    def live(self) -> dict[str, PeerRecord]:
        return self.records

    def subscribe(self, listener: MembershipListener) -> None:
        self.callbacks.append(lambda event: listener.on_membership_changed([event]))


@dataclass
class FakeNodeHandle:
    directory: FakeDirectory
    is_trainer: bool = False
    manifest: Manifest = MANIFEST
    peer_id: str = ME
    revisions: RevisionLog = field(default_factory=RevisionLog)
    own_chain: None = None

    @property
    def admitted(self) -> AdmittedPeers:
        return admitted_of(self.directory, self.manifest)

    def channel(self, peer: str) -> None:
        raise AssertionError("nobody is asked here")


class FakeCommitLog:
    """Takes any commits and keeps none."""

    head = genesis_head(RUN_ID)

    def extend(self, *_: object) -> None:
        pass


def watcher_of(node: FakeNodeHandle, event_log: EventLog) -> SwarmWatcher:
    return SwarmWatcher(node, event_log, FakeCommitLog())  # type: ignore[arg-type]


class KindRecordingEventLog(EventLog):
    """An event log that also keeps the kinds of all events."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        super().__init__(None, [OPENED])

    def record(self, event: DashboardEvent) -> None:
        self.kinds.append(event.kind)
        super().record(event)


class Scene:
    def __init__(self, trains: bool = False) -> None:
        self.directory = FakeDirectory()
        self.event_log = KindRecordingEventLog()
        self.watcher = watcher_of(FakeNodeHandle(self.directory, trains), self.event_log)

    def kinds(self) -> list[str]:
        """Return the kinds of the events since the last call."""
        kinds, self.event_log.kinds = self.event_log.kinds, []
        return kinds


def record(sequence: int = 1, role: str = "trainer", **fields: Any) -> PeerRecord:
    return PeerRecord(sequence=sequence, role=role, **fields)


def test_joining_updating_and_leaving_are_recorded() -> None:
    scene = Scene()
    scene.directory.records = {ME: record(role="observer"), ADA: record()}
    scene.watcher.poll(1.0)
    assert scene.kinds() == ["joined", "moved"] and list(scene.event_log.state.live) == [ADA]
    scene.watcher.poll(1.5)
    assert scene.kinds() == []
    scene.directory.records[ADA] = record(2, step=5)
    scene.watcher.poll(2.0)
    assert scene.kinds() == ["moved"] and scene.event_log.state.peers[ADA].report.step == 5
    del scene.directory.records[ADA]
    scene.directory.callbacks[0](PeerLeft(ADA, "left"))
    scene.watcher.poll(2.5)
    assert scene.kinds() == ["left"] and scene.event_log.state.peers[ADA].reason == "left"


def test_host_shows_itself_only_if_it_trains() -> None:
    for trains in (True, False):
        scene = Scene(trains)
        scene.directory.records = {ME: record()}
        scene.watcher.poll(1.0)
        assert list(scene.event_log.state.live) == [ME] * trains


def test_swarm_is_lost_after_a_while_and_only_if_it_was_seen() -> None:
    scene = Scene()
    for now in (1.0, 5.0, 50.0):
        scene.watcher.poll(now)
    assert scene.kinds() == []
    scene.directory.records = {ADA: record()}
    scene.watcher.poll(51.0)
    scene.event_log.record(committed(0))
    scene.directory.records = {}
    scene.watcher.poll(52.0)
    scene.watcher.poll(52.2)
    assert scene.event_log.state.lost_since is None
    scene.watcher.poll(52.0 + MANIFEST.membership.expiry + 0.1)
    assert scene.event_log.state.lost_since is not None
    scene.directory.records = {ADA: record(2)}
    scene.watcher.poll(60.0)
    assert scene.event_log.state.lost_since is None


@pytest.mark.parametrize(("reason", "is_lost"), [("left", False), ("expired", True)])
def test_swarm_whose_last_peer_said_goodbye_is_not_lost(reason: str, is_lost: bool) -> None:
    scene = Scene()
    scene.directory.records = {ADA: record()}
    scene.watcher.poll(1.0)
    scene.event_log.record(committed(0))
    scene.directory.records = {}
    scene.directory.callbacks[0](PeerLeft(ADA, reason))
    scene.watcher.poll(2.0)
    scene.watcher.poll(3.0 + MANIFEST.membership.expiry)
    assert (scene.event_log.state.lost_since is not None) == is_lost


def test_validation_is_recorded_once_and_after_its_round() -> None:
    scene = Scene()
    scene.directory.records = {ADA: record(validation_round=1, validation_loss=2.5)}
    scene.watcher.poll(1.0)
    assert "measured" not in scene.kinds()
    scene.event_log.record(committed(0))
    for now in (2.0, 3.0):
        scene.watcher.poll(now)
    assert scene.kinds().count("measured") == 1
    row = scene.event_log.state.rows.last
    assert row is not None and row.validation_loss == 2.5


def test_scores_are_recorded_once_a_round_as_the_mean_of_trainers_that_learn_from_some() -> None:
    scene = Scene()
    learns = {ADA: record(reward=0.25), BOB: record(reward=0.75)}
    scene.directory.records = learns
    scene.watcher.poll(1.0)
    assert "scored" not in scene.kinds(), "no round yet"
    scene.event_log.record(committed(0))
    for now in (2.0, 3.0):
        scene.watcher.poll(now)
    scene.directory.records = {ADA: record(), BOB: record()}
    scene.event_log.record(committed(1))
    scene.watcher.poll(4.0)
    assert scene.kinds().count("scored") == 1
    assert [row.reward for row in scene.event_log.state.rows] == [0.5, None]


def test_first_scores_do_not_count_for_the_last_round_of_text() -> None:
    directory, event_log = FakeDirectory(), KindRecordingEventLog()
    scored = MANIFEST.model_copy(update={"rl": ReinforcementSection(task="reverse", start_round=1)})
    watcher = watcher_of(FakeNodeHandle(directory, manifest=scored), event_log)
    directory.records = {ADA: record(reward=0.25)}  # of the round that is open
    for number in range(2):
        event_log.record(committed(number))
        watcher.poll(1.0 + number)
    assert [row.reward for row in event_log.state.rows] == [None, 0.25]


@pytest.mark.parametrize(("count", "expected"), [(2, {"code": 1.5, "books": 2.5}), (0, {}), (1, {}), (3, {})])
def test_validation_losses_of_sources_are_named_by_the_manifest(count: int, expected: dict[str, float]) -> None:
    sources = tuple(SourceSection(name=name, source="text") for name in ("code", "books"))
    mixture = MANIFEST.model_copy(update={"data": DataSection(sources=sources)})
    directory, event_log = FakeDirectory(), KindRecordingEventLog()
    watcher = watcher_of(FakeNodeHandle(directory, manifest=mixture), event_log)
    losses = encode_source_losses([1.5, 2.5, 3.5][:count])
    directory.records = {ADA: record(validation_round=1, validation_loss=2.0, validation_by_source=losses)}
    event_log.record(committed(0))
    watcher.poll(1.0)
    row = event_log.state.rows.last
    assert row is not None and (row.validation_loss, row.validation_by_source) == (2.0, expected)


async def test_validation_on_the_chain_after_a_fork_is_recorded() -> None:
    scene = Scene()
    for number in range(6):
        scene.event_log.record(committed(number))
    scene.directory.records = {ADA: record(validation_round=6, validation_loss=2.0)}
    scene.watcher.poll(1.0)
    assert "measured" in scene.kinds()

    async def fetch_steps(*_: object) -> list[SimpleNamespace]:
        commit = SimpleNamespace(adoption=NOTHING_ADOPTED, round=3)
        return [SimpleNamespace(before=None, electorate=None, entry=None, commit=commit)]

    follower = SimpleNamespace(
        find_trusted_head=lambda *_: (None, []),
        fetch_steps=fetch_steps,
        build_events=lambda *_: [ChainForked(at=2.0, round=3), committed(3)],
    )
    scene.watcher._chain_follower = follower  # type: ignore[assignment]
    await scene.watcher._follow_chain()
    scene.directory.records = {ADA: record(2, validation_round=4, validation_loss=2.5)}
    scene.watcher.poll(3.0)
    row = scene.event_log.state.rows.last
    assert "measured" in scene.kinds() and row is not None and (row.round, row.validation_loss) == (3, 2.5)


def test_validation_in_a_goodbye_is_recorded_once_its_round_is_known() -> None:
    """The last round's loss is often ready when its peer leaves. Control: without the goodbye nobody knows it."""
    scene = Scene()
    for number in range(5):
        scene.event_log.record(committed(number))
    last = record(validation_round=6, validation_loss=2.0)
    scene.watcher.on_membership_changed([PeerLeft(ADA, "left", last)])
    scene.watcher.poll(1.0)
    assert "measured" not in scene.kinds()
    scene.event_log.record(committed(5))
    for now in (2.0, 3.0):
        scene.watcher.poll(now)
    row = scene.event_log.state.rows.last
    assert scene.kinds().count("measured") == 1 and row is not None and (row.round, row.validation_loss) == (5, 2.0)


def test_diverged_peer_is_recorded_once() -> None:
    scene = Scene()
    states = {ADA: b"x", BOB: b"x", PEERS[3].peer_id: b"y"}
    scene.directory.records = {
        peer: record(round=2, digest=b"d" * 32, state_digest=state * 32) for peer, state in states.items()
    }
    for now in (1.0, 2.0):
        scene.watcher.poll(now)
    assert scene.kinds().count("strayed") == 1


def test_churn_of_identities_is_rate_limited() -> None:
    """Control: shown peers stay, and later peers are shown in turn."""
    scene, seconds = Scene(), 100
    for now in range(seconds):
        thrown = {f"{now}-{number}": record() for number in range(100)}
        scene.directory.records = {ADA: record(now + 1), **thrown}
        scene.watcher.poll(float(now))
    joined = scene.kinds().count("joined")
    assert NEWS_BURST <= joined <= NEWS_BURST + NEWS_PER_SECOND * seconds and ADA in scene.event_log.state.live
    scene.directory.records = {ADA: record(seconds + 1), BOB: record()}
    scene.watcher.poll(seconds + 1 / NEWS_PER_SECOND)
    assert set(scene.event_log.state.live) == {ADA, BOB}


def test_claims_of_divergence_are_rate_limited() -> None:
    scene, head, liar = Scene(), b"d" * 32, PEERS[3].peer_id
    scene.directory.records = {peer: record(digest=head, state_digest=b"x" * 32) for peer in (ADA, BOB)}
    for number in range(NEWS_BURST + 100):
        scene.directory.records[liar] = record(number + 1, digest=head, state_digest=b"y" * 32, round=number)
        scene.watcher.poll(1.0)
    assert 0 < scene.kinds().count("strayed") <= NEWS_BURST


def test_number_of_shown_peers_is_limited_and_shown_peers_stay() -> None:
    scene = Scene()
    scene.directory.records = {f"peer-{number}": record() for number in range(MAX_SHOWN_PEERS)}
    scene.watcher.poll(1.0)
    scene.directory.records = {"aaa": record(), **scene.directory.records}
    scene.kinds()
    scene.watcher.poll(2.0)
    assert scene.kinds() == [] and len(scene.event_log.state.live) == MAX_SHOWN_PEERS


@pytest.mark.parametrize(
    "wild",
    [
        {"tokens_per_second": 1e308, "loss": 1e308},
        {"bytes_sent": 2**64 - 1, "tokens": 2**64 - 1, "round": 2**64 - 1, "step": 2**64 - 1},
        {"validation_round": 2**64 - 1, "validation_loss": 1e300},
        {"compute_seconds": 1e308},
    ],
)
async def test_wild_claims_never_break_the_page(wild: dict[str, Any]) -> None:
    scene = Scene()
    with scene.event_log.subscribe():
        for sequence in range(1, 5):
            records = {peer: record(sequence, **wild) for peer in (ADA, BOB)}
            scene.directory.records = records | {
                PEERS[3].peer_id: record(sequence, round=sequence, bytes_sent=sequence)
            }
            scene.watcher.poll(float(sequence))
    assert len(scene.event_log.state.live) == 3


def test_diverged_peer_with_a_huge_round_is_recorded() -> None:
    scene, head = Scene(), b"d" * 32
    scene.directory.records = {peer: record(digest=head, state_digest=b"x" * 32) for peer in (ADA, BOB)}
    scene.directory.records[PEERS[3].peer_id] = record(digest=head, state_digest=b"y" * 32, round=2**64 - 1)
    scene.watcher.poll(1.0)
    assert "strayed" in scene.kinds()


def test_reach_follows_from_the_addresses() -> None:
    relayed, direct = "/ip4/1.2.3.4/tcp/1/p2p/A/p2p-circuit/p2p/B", "/ip4/1.2.3.4/tcp/1/p2p/B"
    at_home = "/ip4/192.168.1.2/tcp/1/p2p/B"
    assert build_peer_report("B", record(addresses=[relayed]), (0.0, 0.0), 1.0).reach == "relay"
    assert build_peer_report("B", record(addresses=[relayed, direct]), (0.0, 0.0), 1.0).reach == "direct"
    assert build_peer_report("B", record(addresses=[relayed, at_home]), (0.0, 0.0), 1.0).reach == "relay"
    assert build_peer_report("B", record(addresses=[at_home]), (0.0, 0.0), 1.0).reach == "direct"
    assert build_peer_report("B", record(), (0.0, 0.0), 1.0).reach == "unknown"
    assert build_peer_report("B", record(addresses=[relayed, at_home]), (0.0, 0.0), 1.0).carriers == ("A",)


def test_byte_rate_is_measured_over_a_window() -> None:
    pace = ByteRate(0.0, 100)
    assert pace.update(200, 1.0) == 0.0
    assert pace.update(500, 2.0) == 200.0
    assert pace.update(510, 3.0) == 200.0
    assert pace.update(3, 4.0) == 0.0


async def test_unwritable_event_log_ends_the_watcher_with_its_reason() -> None:
    scene = Scene()
    scene.directory.records = {ADA: record()}

    def refuse(event: DashboardEvent) -> None:
        raise StorageError("no space left")

    scene.event_log.record = refuse  # type: ignore[method-assign]
    with pytest.raises(StorageError, match="no space left"):
        async with asyncio.timeout(10):
            await scene.watcher.run()
