"""A folder that was copied or restored from a backup: its key signs nothing that it may have signed before."""

import shutil
import tarfile
from pathlib import Path

import pytest

from node.loop.actions import ReportPhase, TakeState
from node.loop.events import HeadPublished, MessagesReceived, PathFound, StateFetched, StateInstalled
from node.loop.peers.swarm_snapshot import PeerState
from node.loop.round_loop import QUIET_SECONDS
from node.run_dir import RunDir
from protocol.blobs.blob import Blob
from protocol.consensus.chain import Chain
from protocol.consensus.messages.contributions import Roster
from protocol.identity import Identity
from tests.certificates import offer_of
from tests.node.loop.loop_under_test import BLOB, FRIEND, STATE, LoopUnderTest, of_kind
from tests.node.small_run import PEERS, RUN_ID, certified, commit_of, contribution_of, stated

VOTERS = (1, 2, 4)  # ME, FRIEND and one more


def founded(rounds: int, contributors: tuple[int, ...] = VOTERS) -> Chain:
    chain = Chain.from_genesis(RUN_ID)
    for number in range(rounds):
        blobs = {peer: Blob.of(f"{number} {peer}".encode()) for peer in contributors}
        chain.append(certified(chain, commit_of(chain.head, blobs), b"mine", VOTERS))
    return chain


def peer_on(chain: Chain, *, was_copied: bool = True, has_friend: bool = True) -> LoopUnderTest:
    peer = LoopUnderTest(was_copied=was_copied)
    peer.chain.switch_to(chain.head, chain.log)
    peer.meet(**({"friend": PeerState(chain.head, b"mine")} if has_friend else {}))
    peer.start()
    return peer


def reasons(peer: LoopUnderTest) -> list[str]:
    return [phase.reason for phase in of_kind(ReportPhase, peer.pass_time(0.1))]


def test_copied_peer_signs_nothing_at_the_head_at_which_it_finds_the_others_and_goes_on_with_the_next() -> None:
    assert peer_on(founded(2), was_copied=False).loop.session.is_open, "the control: it would sign"
    peer = peer_on(founded(2))
    assert not peer.loop.session.is_open
    longer = founded(3)
    peer.chain.switch_to(longer.head, longer.log)
    peer.meet(friend=PeerState(longer.head, b"mine"))
    assert peer.loop.session.is_open, "the others have decided the round"


def test_copied_peer_goes_on_after_a_while_if_nobody_decides_or_shows_its_statement() -> None:
    peer = peer_on(founded(2))
    peer.pass_time(QUIET_SECONDS - 1)
    assert not peer.loop.session.is_open and peer.loop.next_deadline(peer.now) == QUIET_SECONDS
    peer.pass_time(2)
    assert peer.loop.session.is_open


def test_round_in_which_a_statement_of_its_key_is_found_stays_closed() -> None:
    chain = founded(2)
    peer = peer_on(chain)
    ours = stated(PEERS[1], contribution_of(chain.head, (BLOB,)))
    roster = stated(PEERS[2], Roster(chain.round, 0, chain.digest, (ours,)))
    peer.post(MessagesReceived(FRIEND, (roster,)))
    peer.pass_time(10 * QUIET_SECONDS)
    assert not peer.loop.session.is_open, "the other has what we signed for this round"


def test_copied_peer_that_finds_nobody_waits_and_says_what_to_do() -> None:
    peer = peer_on(founded(2), has_friend=False)
    peer.pass_time(10 * QUIET_SECONDS)
    assert not peer.loop.session.is_open
    peer = peer_on(founded(2, contributors=(1,)), has_friend=False)
    assert peer.loop.session.is_open, "the only voter of its run has nobody who could hold something against it"


@pytest.mark.parametrize(("number", "is_quiet"), [(1, True), (4, False)])
def test_chain_with_work_of_ours_that_we_do_not_remember_keeps_us_quiet(number: int, is_quiet: bool) -> None:
    """The folder is that of an old backup, although nothing else shows it: a snapshot of a whole disk, for example."""
    peer = peer_on(founded(2), was_copied=False)
    longer = founded(2)
    for _ in range(30):  # too many to replay
        blobs = {2: Blob.of(f"f{longer.round}".encode()), number: Blob.of(f"n{longer.round}".encode())}
        longer.append(certified(longer, commit_of(longer.head, blobs), b"mine", VOTERS))
    there = PeerState(longer.head, STATE.digest)
    peer.others[PEERS[4].peer_id] = there
    peer.meet(friend=there)
    actions = peer.post(PathFound(offer_of(longer, STATE)))
    if not of_kind(TakeState, actions):
        actions = peer.post(StateFetched())
    assert of_kind(TakeState, actions)
    peer.chain.switch_to(longer.head, longer.log)
    peer.post(StateInstalled(STATE.digest), HeadPublished())
    peer.meet()
    peer.pass_time(1)
    assert peer.loop.session.is_open != is_quiet


def test_folder_knows_whether_it_was_copied_or_restored(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    folder.mkdir()
    Identity.load_or_create(folder / "key")
    assert not RunDir(folder).was_copied() and not RunDir(folder).was_copied(), "a restart is no copy"
    folder = folder.rename(tmp_path / "moved")
    assert not RunDir(folder).was_copied(), "nor is another name"
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))  # as cp -a and rsync -a do
    assert RunDir(copy).was_copied() and not RunDir(copy).was_copied(), "it is said once"
    with tarfile.open(tmp_path / "backup.tar", "w") as archive:
        archive.add(folder, "node")
    shutil.rmtree(folder)
    with tarfile.open(tmp_path / "backup.tar") as archive:
        archive.extractall(tmp_path / "restored", filter="data")
    assert RunDir(tmp_path / "restored" / "node").was_copied()
