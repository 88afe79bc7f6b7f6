import pty
import subprocess
import sys
from pathlib import Path

import pytest

from node.commands.capacity import workload_of
from node.commands.init import InitOptions, check_size, choose_data, facts_of, init, manifest_text
from node.commands.plan.command import describe_if_poor
from node.commands.run_sizes import BUSY, SIZES, find_facts, recorded_facts, recorded_workload, work_values
from node.from_manifest import build_program
from node.model import shape_table
from node.paths import organiser_key_path
from node.units import parse_count
from protocol.errors import ManifestError, MurmurError, UsageError
from protocol.identity import Identity
from protocol.manifest.reading import load_manifest, parse_manifest
from protocol.manifest.run import Manifest
from protocol.signing import load_signed_manifest


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("size", SIZES)
def test_every_size_is_a_run_that_can_be_built(size: str, tmp_path: Path) -> None:
    key = Identity.create().peer_id
    manifest = parse_manifest(manifest_text(InitOptions(size=size), tmp_path, key).encode(), size)
    build_program(manifest)
    parameters = shape_table(manifest.model).numel
    assert manifest.target.tokens == 20 * parameters
    assert manifest.run.organiser_key == key


def test_flags_make_a_manifest_whose_organiser_is_the_users_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("text")
    target = tmp_path / "deep" / "run.toml"
    options = InitOptions(
        name="mary", description='a "first" run', text="texts", size="tiny", peers=3, tokens="2.5M", licence="MIT"
    )
    init(target, options, ask=False)
    manifest = load_signed_manifest(target).manifest
    assert (manifest.data.source, manifest.data.path) == ("text", "../texts/**/*.txt")
    assert (manifest.run.name, manifest.run.min_peers, manifest.target.tokens) == ("mary", 3, 2_500_000)
    assert (manifest.about.description, manifest.about.licence) == ('a "first" run', "MIT")
    assert manifest.run.organiser_key == Identity.load_or_create(organiser_key_path()).peer_id
    assert organiser_key_path().stat().st_mode & 0o077 == 0
    assert f"murmur host {target}" in capsys.readouterr().out
    with pytest.raises(UsageError, match="exists"):
        init(target, options, ask=False)


def test_comments_stay_inside_what_a_person_answers(tmp_path: Path) -> None:
    """Text with quotes, backslashes, hashes and braces is the value, not syntax."""
    odd = 'a # "b" {c} \\ é'
    text = manifest_text(InitOptions(description=odd), tmp_path, Identity.create().peer_id)
    assert parse_manifest(text.encode(), "odd").about.description == odd
    with pytest.raises(ManifestError, match="one line"):
        bad = manifest_text(InitOptions(description="two\nlines"), tmp_path, Identity.create().peer_id)
        parse_manifest(bad.encode(), "bad")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (InitOptions(name="Bad Name"), "is not a name"),
        (InitOptions(size="huge"), "tiny, small, medium, large"),
        (InitOptions(text="nothing.txt"), "there is no text"),
        (InitOptions(tokens="many"), "--tokens"),
        (InitOptions(tokens="0"), "--tokens"),
        (InitOptions(tokens="infG"), "--tokens"),
        (InitOptions(recipe="nix"), "recipe"),
        (InitOptions(tokenizer="nix.json"), "nix.json"),
    ],
)
def test_what_cannot_be_used_is_one_line_and_no_file(options: InitOptions, message: str, tmp_path: Path) -> None:
    with pytest.raises(MurmurError, match=message) as caught:
        init(tmp_path / "run.toml", options, ask=False)
    assert str(caught.value).isprintable()
    assert not (tmp_path / "run.toml").exists()


def test_text_is_recognised_by_what_lies_there(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "header.json").write_text('{"vocabulary": 700}')
    (tmp_path / "one.txt").write_text("text")
    assert choose_data("python-stdlib", "", tmp_path).source == "python-stdlib"
    assert choose_data("hf:user/set", "", tmp_path).path == "user/set"
    assert (choose_data("shards", "", tmp_path).source, choose_data("shards", "", tmp_path).vocabulary) == (
        "tokens",
        700,
    )
    assert choose_data("one.txt", "", tmp_path).source == choose_data("*.txt", "", tmp_path).source == "text"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("packed", r"has no \.txt file, only \.gz; name files by a pattern"),
        ("bare", "no file at all"),
        ("packed/*.gz", "is compressed; unpack it"),
        ("*.md", "no file matches"),
        ("empty.txt", "is empty"),
    ],
)
def test_text_that_cannot_be_trained_on_is_refused_at_once(given: str, words: str, tmp_path: Path) -> None:
    for folder in ("packed", "bare"):
        (tmp_path / folder).mkdir()
    (tmp_path / "packed" / "a.txt.gz").write_bytes(b"x")
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(UsageError, match=words):
        choose_data(given, "", tmp_path)


def test_sizes_have_numbers_and_any_case() -> None:
    assert [check_size(word) for word in ("TINY", "2", " Large ")] == ["tiny", "small", "large"]
    with pytest.raises(UsageError, match="or 1 to 4"):
        check_size("5")


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_recorded_paces_are_those_of_new_predictions_and_keep_volunteers_busy(size: str, tmp_path: Path) -> None:
    """After a change: python -m node.commands.init. Where volunteers are busy, host and join do not warn."""
    key = Identity.create().peer_id
    for (name, recipe), facts in recorded_facts().items():
        if name != size:
            continue
        options = InitOptions(size=size, recipe=recipe)
        plain = parse_manifest(manifest_text(options, tmp_path, key).encode(), size)
        assert facts_of(plain, options) == facts == find_facts(plain), recipe
        text = manifest_text(options, tmp_path, key, facts.schedule())
        manifest = parse_manifest(text.encode(), size)
        build_program(manifest)
        assert recorded_workload(manifest) == workload_of(manifest), recipe
        if facts.busy >= BUSY:
            assert describe_if_poor(manifest) == "", recipe
    assert recorded_facts()[size, "frugal"].busy >= BUSY, "the default of init"


def test_recorded_work_is_that_of_one_model_and_method(tmp_path: Path) -> None:
    """What names the run, its text, its end and its rates leaves the work as it is; every other key changes it."""
    key = Identity.create().peer_id

    def written(old: str = "", new: str = "", name: str = "a", tokens: str = "2M") -> Manifest:
        text = manifest_text(InitOptions(size="tiny", name=name, tokens=tokens), tmp_path, key)
        assert old in text
        return parse_manifest(text.replace(old, new, 1).encode(), "tiny")

    usual = recorded_workload(written())
    assert usual is not None and usual == workload_of(written())
    renamed = written("learning_rate = 3e-3", "learning_rate = 1e-3", name="other", tokens="1M")
    assert work_values(recorded_workload(renamed) or usual) == work_values(usual)
    for change in (
        ("layers = 4", "layers = 5"),
        ("batch_tokens = 2048", "batch_tokens = 4096"),
        ('recipe = "frugal"', 'recipe = "frugal"\nschedule = { inner_steps = 12 }'),
    ):
        assert recorded_workload(written(*change)) is None, change


def test_counts_have_suffixes() -> None:
    assert [parse_count(text, "--tokens") for text in ("300000", "2.5k", "100M", "1B")] == [300_000, 2500, 10**8, 10**9]


@pytest.mark.slow
def test_five_questions_on_a_terminal_are_asked_again_after_a_wrong_answer(home: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "node.cli", "init", str(home / "run.toml")]
    answers = "Bad Name\nmary\nTo learn.\n\nhuge\n1\nnone\n1\n"
    with open(ours, "r+b", buffering=0) as terminal:
        terminal.write(answers.encode())
        result = subprocess.run(command, stdin=theirs, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    manifest = load_manifest(home / "run.toml")
    assert (manifest.run.name, manifest.model.width, manifest.run.min_peers) == ("mary", 128, 1)
    assert manifest.about.description == "To learn."
    assert result.stdout.count("is not a") + result.stderr.count("is not a") == 3


def test_manifest_for_strangers_asks_for_tickets_and_another_does_not(tmp_path: Path) -> None:
    key = Identity.create().peer_id
    for public, mode in ((True, "tickets"), (False, "open")):
        text = manifest_text(InitOptions(public=public), tmp_path, key)
        assert parse_manifest(text.encode(), "").admission.mode == mode
