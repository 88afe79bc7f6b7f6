import itertools
import json
import re
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from protocol.errors import ManifestError, MissingFileError
from protocol.fault_words import WORDS
from protocol.identity import Identity
from protocol.manifest.reading import (
    HUGGING_FACE_NAMES,
    MAX_MANIFEST_BYTES,
    load_manifest,
    manifest_of_values,
    parse_manifest,
)
from protocol.manifest.run import Manifest, changed_keys

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "reference" / "manifest.md"
GOOD = b"""
[run]
name = "demo"

[model]
width = 128
layers = 4
heads = 4
hidden = 344
context = 128

[data]
source = "python-stdlib"

[train]
batch_tokens = 2048
learning_rate = 3e-3

[method]
recipe = "diloco"

[method.codec]
block = 256
"""


def fault(text: bytes) -> str:
    with pytest.raises(ManifestError) as caught:
        parse_manifest(text, "run.toml")
    message = str(caught.value)
    assert message.startswith("run.toml: ")
    assert message.isprintable(), "one line"
    assert len(message) < 400
    return message.removeprefix("run.toml: ")


def test_values_and_defaults() -> None:
    manifest = parse_manifest(GOOD, "run.toml")
    assert manifest.model.width == 128
    assert manifest.model.vocabulary == 256
    assert manifest.method.overrides() == {"codec": {"block": 256}}
    assert manifest.target.rounds is None


def test_toml_round_trip_is_the_same_run() -> None:
    manifest = parse_manifest(GOOD, "run.toml")
    again = parse_manifest(manifest.to_toml().encode(), "again")
    assert again == manifest
    assert again.run_id == manifest.run_id


CHANGING = b"""
block = { rounds = 66, start = 24, end = 140, curve = "exponential" }
kind = [{ value = "none", rounds = 50 }, { value = "int8", rounds = 5 }, "topk"]
k = [{ start = 1, end = 9, rounds = 2 }, { start = 9.0, end = 2, rounds = 3 }]
"""


def test_scheduled_options_survive_a_round_trip_and_have_one_run_id() -> None:
    manifest = parse_manifest(GOOD.replace(b"block = 256", CHANGING), "run.toml")
    assert manifest.method.overrides()["codec"] == {
        "block": {"rounds": 66, "start": 24, "end": 140, "curve": "exponential"},
        "kind": ({"value": "none", "rounds": 50}, {"value": "int8", "rounds": 5}, "topk"),
        "k": ({"start": 1, "end": 9, "rounds": 2}, {"start": 9.0, "end": 2, "rounds": 3}),
    }
    again = parse_manifest(manifest.to_toml().encode(), "again")
    assert again == manifest and again.run_id == manifest.run_id
    ordered = CHANGING.replace(b"rounds = 66, start = 24", b"start = 24, rounds = 66")
    assert parse_manifest(GOOD.replace(b"block = 256", ordered), "").run_id == manifest.run_id
    for old, new in ((b"start = 24", b"start = 24.0"), (b"start = 24", b"start = 25"), (b'"none"', b'"sign"')):
        other = CHANGING.replace(old, new)
        assert parse_manifest(GOOD.replace(b"block = 256", other), "").run_id != manifest.run_id


def test_changed_keys_are_those_of_the_run_id() -> None:
    old = parse_manifest(GOOD, "")
    new = (
        GOOD.replace(b"3e-3", b"1e-3")
        .replace(b"block = 256", b"block = 64")
        .replace(b"[data]", b"tied = false\n[data]")
    )
    changed = changed_keys(old, parse_manifest(new + b"[target]\nrounds = 9\n[about]\nlicence = 'MIT'", ""))
    assert changed == [
        "method.codec.block 256 -> 64",
        "model.tied true -> false",
        "target.rounds none -> 9",
        "train.learning_rate 0.003 -> 0.001",
    ]
    assert not changed_keys(old, parse_manifest(GOOD.replace(b"layers = 4", b"layers = 4\nvocabulary = 256"), ""))


def test_run_id_ignores_layout_defaults_and_bootstrap_and_nothing_else() -> None:
    plain = parse_manifest(GOOD, "").run_id
    assert re.fullmatch("[0-9a-f]{64}", plain)
    assert parse_manifest(GOOD.replace(b"layers = 4", b"layers = 4  # few\nvocabulary = 256"), "").run_id == plain
    peer = Identity.create().peer_id.encode()
    contact = b'"demo"\nbootstrap = ["/dns/a/tcp/1/p2p/' + peer + b'"]'
    assert parse_manifest(GOOD.replace(b'"demo"', contact), "").run_id == plain
    assert parse_manifest(GOOD.replace(b"layers = 4", b"layers = 5"), "").run_id != plain
    assert parse_manifest(GOOD.replace(b"layers = 4", b"layers = 4\nkind = 'llama'"), "").run_id == plain
    assert parse_manifest(GOOD.replace(b"layers = 4", b"layers = 4\nkind = 'other'"), "").run_id != plain
    untied = GOOD.replace(b"layers = 4", b"layers = 4\ntied = false")
    squeezed = untied.replace(b"layers = 4", b"layers = 4\nsubspace = 16")
    assert parse_manifest(squeezed, "").run_id != parse_manifest(untied, "").run_id
    assert parse_manifest(GOOD.replace(b"block = 256", b"block = 128"), "").run_id != plain
    key = Identity.create().peer_id.encode()
    assert parse_manifest(GOOD.replace(b'"demo"', b'"demo"\norganiser_key = ""'), "").run_id == plain
    assert parse_manifest(GOOD.replace(b'"demo"', b'"demo"\norganiser_key = "' + key + b'"'), "").run_id != plain
    assert parse_manifest(GOOD + b"[target]\nkeepers = 1", "").run_id == plain
    assert parse_manifest(GOOD + b"[target]\nkeepers = 2", "").run_id != plain
    assert parse_manifest(GOOD + b'[about]\ndescription = "a first run"', "").run_id == plain


def test_admission_enters_the_run_id_and_each_mode_has_its_own_keys() -> None:
    plain, key = parse_manifest(GOOD, ""), Identity.create().peer_id
    assert plain.admission.mode == "open"
    listed = parse_manifest(GOOD + f'[admission]\nmode = "list"\nkeys = ["{key}"]\ntrusted = true'.encode(), "")
    assert listed.admission.keys == (key,) and listed.run_id != plain.run_id
    founded = parse_manifest(GOOD + f'[admission]\nfounders = ["{key}"]'.encode(), "")
    assert founded.run_id not in (plain.run_id, listed.run_id)
    for table, reason in (
        ('mode = "list"', "needs keys"),
        (f'keys = ["{key}"]', "needs keys"),
        (f'mode = "list"\nkeys = ["{key}", "{key}"]', "once"),
        ('mode = "list"\nkeys = ["mary"]', "peer ids"),
        ("trusted = true", "trusted"),
        (f'mode = "list"\nkeys = ["{key}"]\nfounders = ["{key}"]', "founders"),
        ('mode = "tickets"', "organiser_key"),
        ('mode = "all"', "admission.mode"),
    ):
        assert reason in fault(GOOD + f"[admission]\n{table}".encode())


def test_facts_for_people_are_one_line_each_and_an_organiser_is_a_peer_id() -> None:
    assert "about.description" in fault(GOOD + b'[about]\ndescription = "two\\nlines"')
    assert "about.url" in fault(GOOD + b'[about]\nurl = "javascript:alert(1)"')
    assert "run.organiser_key" in fault(GOOD.replace(b'"demo"', b'"demo"\norganiser_key = "mary"'))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"layers", b"layrs", "unknown key model.layrs (line 7); did you mean layers?"),
        (b"layers", b"num_hidden_layers", "unknown key model.num_hidden_layers (line 7); the key here is layers"),
        (b"[train]", b"[trian]", "unknown table trian (line 15); did you mean train?"),
        (b"[data]", b"[data]\nzzz = 1", "unknown key data.zzz (line 13); known here: source, path, split, "),
        (b"[train]", b"[zzzzzzz]\n[train]", "unknown table zzzzzzz (line 15); known here: run, model, data, "),
        (b"learning_rate = 3e-3", b"", "train.learning_rate is missing; add it"),
        (b"layers = 4", b"layers = '4'", "model.layers (line 7): must be a whole number, got '4'"),
        (b"layers = 4", b"layers = 4.0", "model.layers (line 7): must be a whole number, got 4.0"),
        (b"layers = 4", b"layers = true", "model.layers (line 7): must be a whole number, got true"),
        (b"layers = 4", b"layers = 0", "model.layers (line 7): must be at least 1, got 0"),
        (b"heads = 4", b"heads = 3", "model.width (line 6): must be an even multiple of heads; or give head_size"),
        (b"2048", b"2000", "train.batch_tokens (line 16): must be a multiple of model.context"),
        (b'"python-stdlib"', b'"wiki"', "data.source (line 13): must be 'python-stdlib', 'text'"),
        (b'"demo"', b'"Demo run"', "run.name (line 3): must have 1 to 64 characters of a-z"),
        (b'"demo"', b"2026-11-21", "not valid TOML: no key takes a date or time; put 2026-11-21 in quotes"),
        (b"3e-3", b"nan", "train.learning_rate (line 17): must be a finite number"),
        (b"3e-3", b"inf", "train.learning_rate (line 17): must be a finite number"),
        (b"3e-3", b"-1.0", "train.learning_rate (line 17): must be greater than 0"),
        (b"block = 256", b"block = [1]", "method.codec.block"),
        (b"block = 256", b"block = [[1], 2]", "method.codec.block (line 23): write a plain value, a table of plain"),
        (b"block = 256", b"block = [1, nan]", "method.codec.block (line 23): must be a finite number"),
        (b"block = 256", b"block = { start = { end = 1 } }", "method.codec.block (line 23): write a plain value"),
        (b"block = 256", b"block = [" + b"1," * 65 + b"]", "method.codec.block (line 23): a list has 2 to 64 phases"),
        (
            b"block = 256",
            b"block = { " + b", ".join(b"key%d = 1" % number for number in range(9)) + b" }",
            "method.codec.block (line 23): the table of an option has at most 8 keys",
        ),
        (b"layers = 4", b"layers = 4\nsubspace = 128", "model.subspace (line 8): must be below width"),
        (b"layers = 4", b"layers = 4\nsubspace = 64", "model.subspace (line 8): needs tied = false"),
        (
            b"layers = 4",
            b"layers = 1\ntied = false\nsubspace = 16\nweights = [" + b", ".join([b'"%s"' % (b"ab" * 32)] * 3) + b"]",
            "model.subspace (line 9): cannot be combined with model.from",
        ),
        (b"[method.codec]", b"[method.kodec]", "unknown table method.kodec (line 22); did you mean codec?"),
        (b"[run]", b"[run", "not valid TOML: "),
        (b"[model]", b"[run]", "not valid TOML: table [run] is defined twice; merge the two (line 5)"),
        (b"layers = 4", b"width = 4", "not valid TOML: a key is defined twice; remove one (line 7)"),
        (b"layers = 4", b"layers = " + b"4" * 5000, "not valid TOML: a number has thousands of digits"),
        (b"layers = 4", b"layers =", "not valid TOML: invalid value (line 7)"),
        (
            b"[method.codec]",
            b"[method.codec",
            "not valid TOML: expected ']' at the end of a table declaration (line 22)",
        ),
        (b"", "\ufeff".encode(), "not valid TOML: it begins with a byte order mark; save it as UTF-8 without one"),
        (b'[data]\nsource = "python-stdlib"\n', b"", "the table [data] is missing; add it"),
        (
            b'"demo"',
            b'"demo"\nbootstrap = ["/dns/a/tcp/1"]',
            "run.bootstrap (line 4): /dns/a/tcp/1 does not end in",
        ),
        (b"[run]", b"\xff", "not valid TOML: byte 1 is not UTF-8 text"),
    ],
)
def test_faults_are_reported_on_one_line_with_their_place(old: bytes, new: bytes, message: str) -> None:
    assert old in GOOD
    assert fault(GOOD.replace(old, new, 1)).startswith(message)


WRONG_VALUES: tuple[object, ...] = (
    None,
    True,
    7,
    -1,
    0,
    2**70,
    -0.5,
    1e300,
    "",
    "x" * 2000,
    "\n",
    [],
    [1],
    ["a"],
    {},
    {"a": 1},
    [[]],
)


def section_of(field: FieldInfo) -> type[BaseModel]:
    """The class of a table, which may be absent."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))


def test_no_words_of_the_library_reach_a_person() -> None:
    """Control: the library's own message of most of these values begins with `Input should`."""
    good = parse_manifest(GOOD, "").model_dump(mode="json", exclude_none=True)
    seen: set[str] = set()
    for table, field in Manifest.model_fields.items():
        keys = [(table,), *((table, key) for key in section_of(field).model_fields)]
        for place, value in itertools.product(keys, WRONG_VALUES):
            values = json.loads(json.dumps(good))
            target = values if len(place) == 1 else values.setdefault(table, {})
            target[place[-1]] = value
            try:
                Manifest.model_validate_json(json.dumps(values))
            except ValidationError as error:
                seen |= {fault["type"] for fault in error.errors()}
                with pytest.raises(ManifestError) as caught:
                    manifest_of_values(values, "here")
                assert str(caught.value).isprintable() and len(str(caught.value)) < 400
                assert not re.search("Input|should|Value error|valid |match|not allowed", str(caught.value)), caught
    assert seen <= WORDS.keys() and len(seen) > 12, seen


def test_unknown_key_is_reported_before_the_missing_key_it_misspells() -> None:
    broken = GOOD.replace(b"width = 128", b"wdth = 128").replace(b"context = 128", b"")
    assert fault(broken) == "unknown key model.wdth (line 6); did you mean width?"


@pytest.mark.parametrize(
    "text",
    [
        b"a = " + b"[" * 20_000,
        b"a" + b".a" * 20_000 + b" = 1",
        b"a = { b" + b".a" * 20_000 + b" = 1 }",
        (b"a" + b".a" * 480 + b" = 1\n") * 60,
        b"a = " + b"9" * 20_000,
        b'"a\\nb" = 1',
        b'a = """\n' + b"[" * 60_000 + b'\n"""',
        GOOD.replace(b'"diloco"', b'"' + b"x" * 20_000 + b'"').replace(b'"demo"', b'"' + b"D" * 20_000 + b'"'),
    ],
    ids=[
        "lists",
        "tables",
        "tables inside",
        "many tables",
        "long number",
        "key with a line break",
        "line",
        "long value",
    ],
)
def test_hostile_text_raises_one_short_line(text: bytes) -> None:
    fault(text)


def test_size_is_bounded() -> None:
    assert "at most" in fault(b"#" * (MAX_MANIFEST_BYTES + 1))


@given(st.binary(max_size=300))
def test_any_bytes_parse_or_are_refused(noise: bytes) -> None:
    fault(noise)


@given(st.integers(0, len(GOOD) - 1), st.binary(max_size=4))
def test_any_change_parses_or_is_refused(position: int, noise: bytes) -> None:
    text = GOOD[:position] + noise + GOOD[position + len(noise) :]
    try:
        manifest = parse_manifest(text, "run.toml")
    except ManifestError as error:
        assert str(error).isprintable()
    else:
        assert parse_manifest(manifest.to_toml().encode(), "again").run_id == manifest.run_id


def test_missing_file_and_folder_are_reported(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="nowhere.toml: No such file"):
        load_manifest(tmp_path / "nowhere.toml")
    with pytest.raises(MissingFileError, match="name an existing file"):
        load_manifest(tmp_path)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_every_shipped_manifest_is_valid(path: Path) -> None:
    assert load_manifest(path).target.rounds


def test_reference_names_every_key_and_no_other() -> None:
    known = set()
    for table, field in Manifest.model_fields.items():
        section = section_of(field)
        known |= {f"{table}.{value.alias or key}" for key, value in section.model_fields.items()}
    rows = re.findall(r"^\| \*?\*?`(\w+\.\w+)`", DOCUMENT.read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == known


def test_reference_gives_the_defaults() -> None:
    text = DOCUMENT.read_text()
    for table, field in Manifest.model_fields.items():
        section = section_of(field)
        for key, value in section.model_fields.items():
            name = f"`{table}.{value.alias or key}`"
            row = next(line for line in text.splitlines() if name in line and line.startswith("|"))
            shown = row.split("|")[3].strip()
            assert value.is_required() == row.startswith("| **"), row
            if isinstance(value.default, int | float) and not isinstance(value.default, bool):
                assert float(shown) == value.default, row


def test_names_of_hugging_face_are_hinted_at_and_documented() -> None:
    """They are the keys of a Llama's config.json, so people type them; they are no aliases."""
    text = DOCUMENT.read_text()
    for theirs, ours in HUGGING_FACE_NAMES.items():
        row = next(line for line in text.splitlines() if f"`model.{ours}`" in line and line.startswith("|"))
        assert f"Hugging Face: `{theirs}` |" in row
        broken = GOOD.replace(b"[model]", f"[model]\n{theirs} = 4".encode())
        assert fault(broken) == f"unknown key model.{theirs} (line 6); the key here is {ours}"


PIPELINE = b"[pipeline]\nstages = 4\nmicrobatch = 2\n"


def test_only_a_pipeline_of_several_stages_enters_the_run_id() -> None:
    plain = parse_manifest(GOOD, "")
    assert plain.pipeline.stages == 1 and not plain.pipeline.is_cut
    assert parse_manifest(GOOD + b"[pipeline]\nstages = 1\nin_flight = 3", "").run_id == plain.run_id
    texts = [PIPELINE, PIPELINE + b"in_flight = 3", PIPELINE + b'activations = "fp32"', PIPELINE + b"memory = 2097152"]
    manifests = [parse_manifest(GOOD + text, "") for text in texts]
    assert len({plain.run_id, *(manifest.run_id for manifest in manifests)}) == 5
    assert parse_manifest(manifests[0].to_toml().encode(), "") == manifests[0]
    assert "pipeline.stages" in " ".join(changed_keys(plain, manifests[0]))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (b"stages = 0", "pipeline.stages (line 25): must be at least 1"),
        (b"stages = 129", "pipeline.stages (line 25): must be at most 128"),
        (b"stages = 2\nstaleness = 1", "pipeline.staleness (line 26): steps while microbatches are on their way are"),
        (b"stages = 3\nspeeds = [1, 2]", "pipeline.speeds (line 26): has 2 speeds for 3 stages; write one"),
        (b"stages = 2\nspeeds = [0.5, 2]", "pipeline.speeds.0: must be at least 1.0, got 0.5"),
        (b'stages = 2\nactivations = "int4"', "pipeline.activations (line 26): must be 'fp32', 'bf16' or 'int8'"),
        (b"stages = 2\nmicrobatch = 3", "train.batch_tokens (line 16): must be a multiple of pipeline.microbatch"),
        (b"stages = 2\nmemory = 1000", "pipeline.memory (line 26): must be at least 1048576"),
        (
            b"stages = 2\nmicrobatch = 16\nmemory = 1048576",
            "pipeline.memory (line 27): must hold 8 activations; write at least 4194304",
        ),
    ],
)
def test_pipelines_that_cannot_be_are_refused_with_their_key(table: bytes, message: str) -> None:
    assert fault(GOOD + b"[pipeline]\n" + table).startswith(message)
