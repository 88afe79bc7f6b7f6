import dataclasses
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

import node.commands.up.up
from node.commands.up.peer_process import PeerProcess
from node.commands.up.report import ModelEvaluation
from node.commands.up.up import UpOptions, adapt_manifest, build_peer_processes, resolve_options, up
from node.flags import MachineFlags
from node.run_dir import RunDir
from protocol.errors import AlreadyRunningError, DeviceError, ManifestError, MissingFileError, OtherRunError, UsageError
from protocol.manifest.reading import load_manifest
from protocol.manifest.sections import DataSection, SourceSection

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]
TEST_RUN = ROOT / "configs" / "test.toml"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_demo_with_kill_test_is_the_default() -> None:
    plan = resolve_options(UpOptions())
    assert plan.manifest.run.name == "demo"
    assert plan.folder == Path("runs/demo-1")
    assert (plan.peers, plan.drill) == (3, True)


def test_named_manifest_has_no_kill_test_by_default() -> None:
    assert not resolve_options(UpOptions(run=TEST_RUN)).drill
    assert resolve_options(UpOptions(run=TEST_RUN, drill=True)).drill
    assert not resolve_options(UpOptions(drill=False)).drill


def test_run_waits_for_all_started_peers() -> None:
    assert resolve_options(UpOptions(run=TEST_RUN, peers=5)).manifest.run.min_peers == 5
    assert resolve_options(UpOptions(run=TEST_RUN, peers=1)).peers == 1


def test_command_line_overrides_the_manifest(tmp_path: Path) -> None:
    given = load_manifest(TEST_RUN)
    made = adapt_manifest(given, tmp_path, 3, UpOptions(rounds=7, seed=5, recipe="sparseloco"))
    assert made.target.rounds == 7
    assert made.run.seed == 5
    assert made.method.recipe == "sparseloco"
    assert made.method.overrides() == {}
    kept = adapt_manifest(given, tmp_path, 3, UpOptions(recipe="diloco"))
    assert kept.method == given.method


def test_limits_are_checked_before_a_peer_starts_and_passed_to_all() -> None:
    limited = resolve_options(UpOptions(run=TEST_RUN, flags=MachineFlags(upload="20mbit", download="1MB")))
    for peer in build_peer_processes(limited):
        assert "--upload 20mbit --download 1MB" in " ".join(peer._command)
    with pytest.raises(UsageError, match="--upload: '20mb' is not a rate"):
        resolve_options(UpOptions(run=TEST_RUN, flags=MachineFlags(upload="20mb")))


def test_address_of_the_page_is_checked_before_a_peer_starts() -> None:
    page = resolve_options(UpOptions(run=TEST_RUN, http=":8090")).page
    assert page is not None and (page.host, page.port) == ("127.0.0.1", 8090)
    assert resolve_options(UpOptions(run=TEST_RUN)).page is None
    with pytest.raises(UsageError, match="--http"):
        resolve_options(UpOptions(run=TEST_RUN, http="nowhere"))


@pytest.mark.parametrize(
    ("source", "path", "expected"),
    [
        ("text", "books/*.txt", "{base}/books/*.txt"),
        ("text", "/books/*.txt", "/books/*.txt"),
        ("tokens", "shards", "{base}/shards"),
        ("hf", "someone/books", "someone/books"),
        ("hf", "here", "{base}/here"),
        ("python-stdlib", "", ""),
    ],
)
def test_data_paths_become_absolute(tmp_path: Path, source: str, path: str, expected: str) -> None:
    (tmp_path / "here").mkdir()
    given = load_manifest(TEST_RUN)
    data = given.data.model_copy(update={"source": source, "path": path, "tokenizer": "words.json"})
    made = adapt_manifest(given.model_copy(update={"data": data}), tmp_path, 3, UpOptions())
    assert made.data.path == expected.format(base=tmp_path)
    mixed = DataSection(sources=(SourceSection.model_validate({"name": "a", "source": source, "path": path}),))
    made_mixed = adapt_manifest(given.model_copy(update={"data": mixed}), tmp_path, 3, UpOptions())
    assert made_mixed.data.mixture[0].path == expected.format(base=tmp_path)
    assert made.data.tokenizer == str(tmp_path / "words.json")


def test_folder_resumes_with_its_own_manifest(tmp_path: Path) -> None:
    first = resolve_options(UpOptions(run=TEST_RUN, folder=tmp_path, peers=4, seed=9))
    (tmp_path / "run.toml").write_text(first.manifest.to_toml())
    again = resolve_options(UpOptions(folder=tmp_path))
    assert again.manifest.run_id == first.manifest.run_id
    assert again.peers == 4
    assert not again.drill


def test_peer_commands(tmp_path: Path) -> None:
    processes = build_peer_processes(
        resolve_options(UpOptions(run=TEST_RUN, folder=tmp_path, flags=MachineFlags(device="cpu")))
    )
    assert [process.name for process in processes] == ["peer-0", "peer-1", "peer-2"]
    command = " ".join(processes[1]._command)
    assert f"-m node.cli join {tmp_path}/run.toml --dir {tmp_path}/peer-1 --name peer-1 --threads" in command
    assert "--device cpu --listen /ip4/127.0.0.1/tcp/0" in command


def test_machine_flags_are_passed_to_the_peers(tmp_path: Path) -> None:
    options = UpOptions(
        run=TEST_RUN, folder=tmp_path, flags=MachineFlags(threads=3, memory="2GB", pause_when_busy=True)
    )
    command = " ".join(build_peer_processes(resolve_options(options))[0]._command)
    assert "--threads 3 --memory 2GB --pause-when-busy --device" in command
    with pytest.raises(UsageError, match="--memory: 'much' is not a size"):
        resolve_options(UpOptions(run=TEST_RUN, folder=tmp_path, flags=MachineFlags(memory="much")))


def test_folder_of_another_run_or_in_use_is_refused(tmp_path: Path) -> None:
    up_claims = resolve_options(UpOptions(run=TEST_RUN, folder=tmp_path))
    with RunDir(tmp_path).lock(up_claims.manifest), pytest.raises(AlreadyRunningError):
        up(UpOptions(run=TEST_RUN, folder=tmp_path))
    with pytest.raises(OtherRunError):
        up(UpOptions(run=TEST_RUN, folder=tmp_path, seed=1))
    assert not (tmp_path / "peer-0").exists()


def test_unknown_method_fails_before_the_folder_is_locked(tmp_path: Path) -> None:
    """The corrected manifest is another run, which the folder would refuse."""
    wrong = tmp_path / "run.toml"
    wrong.write_text(TEST_RUN.read_text().replace('recipe = "', 'recipe = "x'))
    with pytest.raises(ManifestError, match="did you mean"):
        up(UpOptions(run=wrong, folder=tmp_path / "swarm"))
    assert not (tmp_path / "swarm").exists()


def test_missing_text_is_named_before_a_peer_starts(tmp_path: Path) -> None:
    text = TEST_RUN.read_text().replace('source = "python-stdlib"', 'source = "text"\npath = "none/*.txt"')
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(MissingFileError, match="no file matches data.path"):
        up(UpOptions(run=tmp_path / "run.toml", folder=tmp_path / "swarm"))
    assert not (tmp_path / "swarm" / "peer-0").exists()


@pytest.mark.parametrize("flags", [MachineFlags(weights="bf16"), MachineFlags(fp8=True)])
def test_device_that_cannot_train_so_is_refused_before_a_peer_starts(tmp_path: Path, flags: MachineFlags) -> None:
    with pytest.raises(DeviceError):
        up(UpOptions(folder=tmp_path / "run", flags=dataclasses.replace(flags, device="cpu")))
    assert not (tmp_path / "run").exists()


def test_missing_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        up(UpOptions(run=tmp_path / "nowhere.toml"))
    assert not (tmp_path / "runs").exists()


class FakePeersAndModel:
    """Fake peers, and a fixed evaluation of their model."""

    def __init__(self, target: int) -> None:
        self.target = target

    def processes(self, plan: node.commands.up.up.SwarmConfig) -> list[PeerProcess]:
        fake, epoch = str(Path(__file__).with_name("fake_peer.py")), str(time.time())
        homes = [plan.folder / f"peer-{index}" for index in range(plan.peers)]
        return [
            PeerProcess(home.name, home, [sys.executable, fake, str(home), epoch, str(self.target)]) for home in homes
        ]

    @staticmethod
    def examine(_: object, folder: Path) -> ModelEvaluation:
        return ModelEvaluation(folder / "c", folder / "export", 10, 1000, 5.0, 2.0, "def murmur():")


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> FakePeersAndModel:
    made = FakePeersAndModel(target=10)
    monkeypatch.setattr(node.commands.up.up, "build_peer_processes", made.processes)
    monkeypatch.setattr(node.commands.up.up, "evaluate_model", made.examine)
    return made


@pytest.mark.usefixtures("fakes")
def test_standard_output_is_only_json_with_the_json_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert up(UpOptions(run=TEST_RUN, folder=tmp_path, peers=2, json=True)) == 0
    out, notes = capsys.readouterr()
    report = json.loads(out)
    assert report["validation_loss"] == 2.0
    assert report["digests"] == {"id-of-peer-0": f"{10:064x}", "id-of-peer-1": f"{10:064x}"}
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert "2 peers in" in notes


@pytest.mark.usefixtures("fakes")
def test_report_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert up(UpOptions(run=TEST_RUN, folder=tmp_path, peers=2)) == 0
    out = capsys.readouterr().out
    assert "test: 2 peers in" in out
    assert "5.000 -> 2.000 nats per token" in out


def test_differing_models_are_a_failure(
    fakes: FakePeersAndModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agreeing = fakes.processes

    def one_disagrees(plan: node.commands.up.up.SwarmConfig) -> list[PeerProcess]:
        first, second = agreeing(plan)
        return [first, PeerProcess(second.name, second.folder, [*second._command, "--digest", "other"])]

    monkeypatch.setattr(node.commands.up.up, "build_peer_processes", one_disagrees)
    assert up(UpOptions(run=TEST_RUN, folder=tmp_path, peers=2)) == 1
    assert "DIFFER" in capsys.readouterr().out


def test_interrupt_shows_how_to_resume(
    fakes: FakePeersAndModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.target = 10_000

    def interrupt() -> None:
        deadline = time.monotonic() + 20
        while not (tmp_path / "peer-1" / "node.json").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    person = threading.Thread(target=interrupt)
    person.start()
    assert up(UpOptions(run=TEST_RUN, folder=tmp_path, peers=2)) == 130
    person.join()
    assert f"`murmur up --dir {tmp_path}` resumes the run" in capsys.readouterr().out.replace("\n", "")
    assert not (tmp_path / "report.json").exists()


def test_manifest_in_a_folder_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    """Control: in another folder it is accepted."""
    for name, accepted in ((b"plain", True), (b"caf\xe9", False)):
        folder = tmp_path / os.fsdecode(name)
        folder.mkdir()
        run = folder / "run.toml"
        run.write_text((Path(__file__).parents[4] / "configs" / "test.toml").read_text())
        if accepted:
            resolve_options(UpOptions(run=run))
            continue
        with pytest.raises(UsageError, match=r"the path .*caf\\udce9/run.toml' is not UTF-8 text; use another folder"):
            resolve_options(UpOptions(run=run))
