"""The stage of a newcomer: what the user says, what the folder holds, else the weakest stage."""

import asyncio
import logging
from pathlib import Path

import pytest

from node.daemon.stages import placement as module
from node.daemon.stages.placement import change_stage, choose_stage, choose_stages, weakest_stage
from node.options import NodeOptions
from node.paths import kept_stage_dir
from node.run_dir import RunDir
from protocol.errors import UsageError
from protocol.identity import PeerId
from protocol.manifest.reading import load_manifest
from protocol.manifest.run import Manifest
from protocol.murmur_pb2 import PeerRecord
from protocol.pipeline.stage import stage_of

CONTACT = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"


def trainer(stage: int, rate: float = 0.0, **fields: object) -> PeerRecord:
    return PeerRecord(role="trainer", stage=stage + 1, stage_rate=rate, **fields)  # type: ignore[arg-type]


def chosen(*records: PeerRecord, stages: int = 4, me: PeerId = "me") -> int:
    return weakest_stage({f"peer-{number}": record for number, record in enumerate(records)}, stages, me).stage


def test_each_of_four_newcomers_takes_an_empty_stage_and_by_key_alone_one_stays_empty() -> None:
    records: dict[PeerId, PeerRecord] = {}
    for me in (f"peer-{number}" for number in range(4)):
        records[me] = trainer(weakest_stage(records, 4, me).stage)
    assert {record.stage for record in records.values()} == {1, 2, 3, 4}
    by_key = {weakest_stage({}, 4, me).stage for me in records}
    assert len(by_key) < 4  # the naive rule


def test_a_newcomer_takes_the_stage_with_the_lowest_sum_of_rates() -> None:
    slow_pair, fast = (trainer(1, 1.0), trainer(1, 1.0)), trainer(0, 3.0)
    assert chosen(*slow_pair, fast, stages=2) == 1  # though stage 0 has fewer peers


def test_a_trainer_without_a_rate_counts_with_the_median() -> None:
    records = (trainer(0), trainer(1, 2.0), trainer(1, 2.0), trainer(2, 5.0))  # the median is 2
    assert chosen(*records, stages=3) == 0
    assert chosen(trainer(0), trainer(1, 1.0), trainer(2, 5.0), trainer(2, 7.0), stages=3) == 1  # the median is 5


def test_observers_leavers_unknown_stages_and_the_own_last_record_do_not_count() -> None:
    records = {
        "a": trainer(0, 5.0),
        "b": PeerRecord(role="observer", stage=2, stage_rate=9.0),
        "c": trainer(1, 9.0, leaving=True),
        "d": trainer(99, 9.0),
        "me": trainer(1, 9.0),
    }
    choice = weakest_stage(records, 2, "me")
    assert (choice.stage, choice.reason) == (1, "nobody serves it")


def test_keys_spread_over_stages_that_are_equally_weak() -> None:
    records = {str(stage): trainer(stage, 1.0 if stage else 9.0) for stage in range(4)}
    assert {weakest_stage(records, 4, f"key {number}").stage for number in range(40)} == {1, 2, 3}


@pytest.fixture
def options(tmp_path: Path) -> NodeOptions:
    cut = load_manifest(Path("configs/pipeline.toml"))
    return NodeOptions(manifest=cut, base=tmp_path, folder=tmp_path, peers=(CONTACT,))


def choose(options: NodeOptions, monkeypatch: pytest.MonkeyPatch, records: dict[PeerId, PeerRecord]) -> int | None:
    async def find_records(manifest: Manifest, addresses: object) -> dict[PeerId, PeerRecord]:
        return records

    monkeypatch.setattr(module, "find_records", find_records)
    return stage_of(asyncio.run(choose_stage(options, RunDir(options.folder), "me")))


def test_a_node_keeps_its_stage_and_logs_why(
    options: NodeOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    served = {str(stage): trainer(stage, 1.0) for stage in (0, 1, 3)}
    assert choose(options, monkeypatch, served) == 2
    assert choose(options, monkeypatch, {**served, "2": trainer(2, 9.0)}) == 2
    assert [record.message for record in caplog.records] == [
        "serving stage 2 of 4: nobody serves it",
        "serving stage 2 of 4: its folder holds that one",
    ]
    with pytest.raises(UsageError, match="holds stage 2, not 1"):
        choose(options.model_copy(update={"stage": 1}), monkeypatch, served)


def test_the_user_chooses_and_without_an_answer_the_key_does(
    options: NodeOptions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pinned = options.model_copy(update={"stage": 3, "folder": tmp_path / "pinned"})
    pinned.folder.mkdir()
    assert choose(pinned, monkeypatch, {"0": trainer(0)}) == 3
    assert choose(options, monkeypatch, {}) == weakest_stage({}, 4, "me").stage


def served(options: NodeOptions, **changes: object) -> list[int | None]:
    changed = options.model_copy(update=changes)
    places = asyncio.run(choose_stages(changed, RunDir(options.folder), "me"))
    assert len({place.path for _, place in places}) == len(places)
    return [stage_of(manifest) for manifest, _ in places]


def test_a_node_serves_all_stages_from_then_on(options: NodeOptions) -> None:
    assert served(options, stage="all") == [0, 1, 2, 3]
    assert served(options) == [0, 1, 2, 3], "its folder holds all"
    with pytest.raises(UsageError, match="holds all stages, not 2"):
        served(options, stage=2)


def test_a_folder_of_one_stage_does_not_serve_all(options: NodeOptions) -> None:
    assert served(options, stage=2) == [2]
    kept_stage_dir(options.folder, 1).mkdir()  # of a state that the node keeps for others
    assert served(options) == [2]
    with pytest.raises(UsageError, match="holds stage 2, not all"):
        served(options, stage="all")


@pytest.mark.parametrize("changes", [{"mode": "exact"}, {"stages": 9}])
def test_all_stages_are_refused_where_a_node_cannot(options: NodeOptions, changes: dict[str, object]) -> None:
    table = options.manifest.pipeline.model_copy(update=changes)
    with pytest.raises(UsageError, match="--stage all"):
        served(options, stage="all", manifest=options.manifest.model_copy(update={"pipeline": table}))


def test_folder_of_a_peer_that_moves_keeps_what_binds_it_at_its_old_stage_aside(tmp_path: Path) -> None:
    """Its vote in the open round must bind it if it comes back. States and contributions of the old stage go."""
    folder = RunDir(tmp_path)
    folder.write_stage(0, 2)
    (folder.checkpoints / "a.round-1").mkdir(parents=True)
    folder.contribution_file.write_text("contribution")
    folder.vote_log.write_text("vote at stage 0")
    change_stage(folder, 1, 2)
    assert folder.read_stage() == 1
    assert not any(path.exists() for path in (folder.checkpoints, folder.contribution_file, folder.vote_log))
    folder.vote_log.write_text("vote at stage 1")
    change_stage(folder, 0, 2)
    assert folder.read_stage() == 0 and folder.vote_log.read_text() == "vote at stage 0"
    change_stage(folder, 1, 2)
    assert folder.vote_log.read_text() == "vote at stage 1"
