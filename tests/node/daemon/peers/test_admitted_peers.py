"""Who counts: tickets and lists at stages and stores, and standing by certified commits."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from node.daemon.checkpoints.vote_log import ContradictionFile
from node.daemon.peers.admitted_peers import AdmittedPeers
from node.daemon.stages import service
from node.daemon.stages.service import StagesService
from node.daemon.stages.stage_effects import NodeStages
from node.daemon.stages.stage_peers import lowest_round, stage_peers
from protocol.blobs.blob import Blob
from protocol.electorate import OPEN, Electorate
from protocol.errors import MalformedError, StaleError
from protocol.identity import Identity
from protocol.manifest.sections import AdmissionSection
from protocol.murmur_pb2 import PeerRecord, ReleaseRequest, StageOutcome, StageTask, StepStatement
from protocol.pipeline.results import (
    Contradiction,
    ResultValue,
    SignedResult,
    StageQuestion,
    StageResult,
    sign_result,
)
from tests.node.small_run import MANIFEST, PEERS, admitted_of
from tests.ratchet import read_sources

FRIEND, STRANGER = PEERS[0].peer_id, PEERS[1].peer_id
RUN = "ab" * 32
LISTED = MANIFEST.model_copy(update={"admission": AdmissionSection(mode="list", keys=(FRIEND,))})
TICKETS = MANIFEST.model_copy(update={"admission": AdmissionSection(mode="tickets")})

# Where product code may read records of peers that the run does not admit, and why.
ALLOWED = {
    ("node/daemon/peers/admitted_peers.py", "records"): "makes the view of those who count",
    ("node/daemon/peers/admitted_peers.py", "require"): "looks for the ticket of a caller",
    ("node/daemon/peers/swarm_view.py", "_live"): "addresses, and hosts, which need no ticket",
    ("node/daemon/peers/swarm_view.py", "rollout_peers"): "asks the rule for each peer that draws rollouts",
    ("node/daemon/peers/swarm_view.py", "live_peers"): "chosen peers only: whether calls may arrive",
    ("node/daemon/peers/swarm_view.py", "snapshot"): "heads that certificates prove; trainers only if admitted",
    ("node/daemon/peers/swarm_view.py", "stage_witnesses"): "prefers those that the run admits",
    ("node/daemon/stages/activations.py", "_download"): "how long to wait for one holder",
    ("node/daemon/node.py", "status_fields"): "our own record, and the number of live peers",
    ("node/daemon/peers/run_contacts.py", "read_peer_table"): "what one peer knows; `choose_stage` asks the rule",
    ("node/commands/doctor/network.py", "_fetch_peer_table"): "counts who answers",
    ("node/dashboard/command.py", "status"): "our own record",
}  # fmt: skip


class Directory:
    """Peers with these records."""

    peer_id = "me"

    def __init__(self, **records: PeerRecord) -> None:
        self.records = records

    def live(self) -> dict[str, PeerRecord]:
        return self.records

    def record_refusal(self, peer: str, fault: Exception) -> None:
        self.refused = peer, str(fault)


def trainer(stage: int, **fields: Any) -> PeerRecord:
    return PeerRecord(role="trainer", stage=stage + 1, stage_life=1, **fields)


def cut_in_two(directory: Directory, manifest: Any = MANIFEST) -> AdmittedPeers:
    return admitted_of(directory, manifest, stages=2)


def certified(*voters: str, late: tuple[str, ...] = ()) -> Electorate:
    return Electorate(OPEN, 9, frozenset(voters), dict.fromkeys(late, 1))


@pytest.mark.parametrize("manifest", [LISTED, TICKETS], ids=["list", "tickets"])
def test_stages_see_no_trainer_that_the_run_does_not_admit(manifest: Any) -> None:
    directory = Directory(**{STRANGER: trainer(0), "host": PeerRecord(role="observer", stage=1)})
    assert not any(stage_peers(cut_in_two(directory, manifest).records(), 2, ()))
    assert [entry.peer for entry in stage_peers(cut_in_two(directory).records(), 2, ())[0]] == [STRANGER], "the control"
    assert "host" in cut_in_two(directory, manifest).records(), "who only keeps states needs no ticket"


def test_standing_comes_from_commits_once_a_stage_has_some() -> None:
    keys = {f"key {number}": trainer(0) for number in range(100)}
    peers = cut_in_two(Directory(**keys, one=trainer(0), two=trainer(0), three=trainer(1)))
    assert len(peers.standing_records()) == 103, "before the first commit all admitted trainers have it"
    peers.learn(0, certified("one", late=("two",)))
    assert peers.standing_records().keys() == {"one", "two", "three"}
    peers.learn(1, certified("three"))
    assert peers.standing_records().keys() == {"one", "two", "three"}


def test_stage_whose_peers_with_standing_are_gone_goes_on_without_them() -> None:
    peers = cut_in_two(Directory(new=trainer(0), other=trainer(1)))
    peers.learn(0, certified("gone"))
    peers.learn(1, certified("other"))
    assert peers.standing_records().keys() == {"new", "other"}


def test_free_key_neither_holds_a_stage_back_nor_pushes_it() -> None:
    directory = Directory(one=trainer(1, round=8), liar=trainer(1, round=4000))
    peers = cut_in_two(directory)
    assert lowest_round(peers.standing_records().values(), own_stage=0) == 4000, "the control: nothing is known yet"
    peers.learn(1, certified("one"))
    assert lowest_round(peers.standing_records().values(), own_stage=0) == 8


def test_lost_peer_had_standing_only_by_commits() -> None:
    peers = cut_in_two(Directory())
    assert peers.had_standing("key", trainer(0)), "nobody has another kind yet"
    peers.learn(0, certified("one"))
    assert not peers.had_standing("key", trainer(0)) and peers.had_standing("one", trainer(0))


def contradiction(honest: int, liar: Identity = PEERS[0]) -> Contradiction:
    """Return a false result, and the results of the same pass by so many others."""
    question = StageQuestion(8, bytes(32), "forward", (b"\1" * 32, b"", b""), "cpu")

    def result(maker: Identity, content: bytes) -> SignedResult:
        return sign_result(maker, RUN, StageResult(question, ResultValue(Blob.of(content), None)))

    others = [result(each, b"true") for each in PEERS[1 : 1 + honest]]
    return Contradiction(RUN, (result(liar, b"false"), *others))


def test_key_whose_result_the_voters_contradict_counts_nowhere() -> None:
    voters = [each.peer_id for each in PEERS[:3]]
    directory = Directory(**{voter: trainer(0) for voter in voters})
    peers = cut_in_two(directory)
    with pytest.raises(StaleError):
        peers.exclude(contradiction(2), 0)  # before the first commit nobody votes
    peers.learn(0, certified(*voters))
    with pytest.raises(StaleError):
        peers.exclude(contradiction(1), 0)
    peers.require(voters[0])
    assert peers.exclude(contradiction(2), 0) and not peers.exclude(contradiction(2), 0), "it is news once"
    assert peers.records().keys() == peers.standing_records().keys() == set(voters[1:])
    assert not peers.admits(voters[0], directory.records[voters[0]])
    with pytest.raises(StaleError):
        peers.require(voters[0])


@pytest.mark.parametrize(
    ("spoil", "is_kept"),
    [
        (lambda text: text, True),
        (lambda text: "[]", False),
        (lambda text: text.replace(PEERS[1].peer_id, PEERS[3].peer_id), False),
        (lambda text: text[:-9], False),
        (lambda text: '[{"contradiction": "zz", "voters": []}, 7]', False),
    ],
    ids=["kept", "control: nothing", "other voters", "cut", "damaged"],
)
def test_restarted_node_excludes_by_the_evidence_on_disk(
    tmp_path: Path, spoil: Callable[[str], str], is_kept: bool
) -> None:
    voters = [each.peer_id for each in PEERS[:3]]
    directory = Directory(**{voter: trainer(0) for voter in voters})
    before = cut_in_two(directory)
    before.learn(0, certified(*voters))
    assert before.exclude(contradiction(2), 0)
    file = ContradictionFile(tmp_path / "contradictions.json")
    assert not file.load({RUN})
    file.save(before.excluded.values())
    (tmp_path / "contradictions.json").write_text(spoil((tmp_path / "contradictions.json").read_text()))
    after = AdmittedPeers(cast(Any, directory), before.gate, 2, file.load({RUN}))
    assert (voters[0] not in after.records()) is is_kept
    assert not file.load({"cd" * 32}), "of another run"
    directory.peer_id = voters[0]
    assert not AdmittedPeers(cast(Any, directory), before.gate, 2, file.load({RUN})).contradicted, "nobody itself"


def test_nobody_excludes_itself() -> None:
    voters = [each.peer_id for each in PEERS[:3]]
    directory = Directory(**{voter: trainer(0) for voter in voters})
    directory.peer_id = voters[0]
    peers = cut_in_two(directory)
    peers.learn(0, certified(*voters))
    assert not peers.exclude(contradiction(2), 0) and voters[0] in peers.records()


def test_revoked_key_is_no_trainer_of_any_stage() -> None:
    peers = cut_in_two(Directory(one=trainer(0)))
    peers.learn(1, Electorate(OPEN, 9, frozenset({"other"}), revoked=frozenset({"one"})))
    assert not peers.records()


class Stage:
    """Takes no statements."""

    store = None

    def take_statement(self, peer: str, body: object) -> None:
        raise MalformedError("steps are not exact")


class Context:
    async def abort(self, code: object, text: str) -> None:
        raise PermissionError(text)


CALLS = [
    ("Ask", StageTask()), ("Tell", StageOutcome()), ("Release", ReleaseRequest()), ("State", StepStatement()),
]  # fmt: skip


@pytest.mark.parametrize(("method", "request_body"), CALLS)
async def test_list_holds_for_calls_about_microbatches(
    method: str, request_body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "caller", lambda context: STRANGER)
    directory = Directory()
    for manifest, is_refused in ((LISTED, True), (MANIFEST, False)):
        node = NodeStages(cut_in_two(directory, manifest), cast(Any, None))
        node.add("stage", cast(Any, Stage()))
        with pytest.raises(PermissionError) as refusal:
            await getattr(StagesService(node, cast(Any, directory)), method)(request_body, Context())
        assert ("does not admit" in str(refusal.value)) == is_refused, "an open run looks at the call itself"
        assert directory.refused[0] == STRANGER


def reads(tree: ast.AST, function: str = "") -> Iterator[tuple[str, int]]:
    """Yield each call of `live()` with the function that makes it."""
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "live":
            yield function, node.lineno
        yield from reads(node, inside)


def test_records_that_decide_something_are_admitted_ones() -> None:
    sources = [source for package in ("node", "murmuration") for source in read_sources(package)]
    found = {(str(source.path), name): line for source in sources for name, line in reads(source.tree)}
    assert found and not [f"{place[0]}:{line}" for place, line in found.items() if place not in ALLOWED]
    assert not ALLOWED.keys() - found.keys(), "no longer needed"


def test_the_check_sees_a_reader() -> None:
    tree = ast.parse("class A:\n    def plan(self):\n        return [p for p in self._directory.live().values()]")
    assert list(reads(tree)) == [("plan", 3)]
