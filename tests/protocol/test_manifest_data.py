"""The sources of a mixture: what a manifest may say of them, and the one line for what it may not."""

import pytest

from protocol.errors import ManifestError
from protocol.manifest.reading import parse_manifest
from protocol.manifest.run import Manifest
from protocol.manifest.sections import MAX_SOURCES

HEAD = b"""
[run]
name = "demo"
[model]
width = 8
layers = 1
heads = 1
hidden = 8
context = 8
[train]
batch_tokens = 8
learning_rate = 1e-3
[method]
recipe = "diloco"
[data]
"""
SINGLE = b'source = "python-stdlib"\n'
MIXTURE = b"""
[[data.sources]]
name = "code"
source = "python-stdlib"
weight = 3

[[data.sources]]
name = "books"
source = "text"
path = "books/*.txt"
"""


def parse(data: bytes) -> Manifest:
    return parse_manifest(HEAD + data, "run.toml")


def test_mixture_is_kept_over_a_round_trip_and_enters_the_run_id() -> None:
    manifest = parse(MIXTURE)
    assert [(entry.name, entry.source, entry.weight) for entry in manifest.data.mixture] == [
        ("code", "python-stdlib", 3.0),
        ("books", "text", 1.0),
    ]
    assert parse_manifest(manifest.to_toml().encode(), "again").run_id == manifest.run_id
    others = {parse(MIXTURE.replace(b"weight = 3", b"weight = 4")).run_id, parse(SINGLE).run_id, manifest.run_id}
    assert len(others) == 3


def test_single_source_is_a_mixture_of_one_and_keeps_its_run_id() -> None:
    manifest = parse(SINGLE)
    (source,) = manifest.data.mixture
    assert (source.name, source.source, source.key) == ("", "python-stdlib", "data")
    assert manifest.data.first_weights == manifest.source_weights(9, 99) == (1.0,)
    assert b"sources" not in manifest.canonical() and b'"sources"' in parse(MIXTURE).canonical()


PHASES = b"""
[[data.phases]]
tokens = 500
weights = { code = 1, books = 1 }
[[data.phases]]
share = 0.8
weights = { code = 0, books = 1 }
"""
TARGET = b"[target]\ntokens = 1000\n"


def test_weights_follow_the_tokens_of_the_run_and_the_share_of_its_target() -> None:
    manifest = parse(MIXTURE + PHASES + TARGET)
    found = {tokens: manifest.source_weights(9, tokens) for tokens in (0, 499, 500, 799, 800, 5000)}
    first, second, third = (3.0, 1.0), (1.0, 1.0), (0.0, 1.0)
    assert list(found.values()) == [first, first, second, second, third, third]
    by_rounds = parse(MIXTURE + PHASES + TARGET.replace(b"tokens", b"rounds"))
    assert by_rounds.source_weights(799, 0) == first and by_rounds.source_weights(800, 0) == third
    steered = manifest.model_copy(
        update={"data": manifest.data.model_copy(update={"weights": {"books": 2.0, "code": 5.0}})}
    )
    assert {steered.source_weights(9, tokens) for tokens in found} == {(5.0, 2.0)}
    assert (
        b"phases" not in parse(MIXTURE).canonical()
        and b"weights" not in parse(SINGLE).canonical()[:-1].split(b'"model"')[0]
    )


def test_revision_of_unknown_sources_changes_nothing_instead_of_ending_the_run() -> None:
    data = parse(MIXTURE + PHASES + TARGET).data
    for weights in ({"code": 1.0}, {"code": 1.0, "songs": 1.0}):
        assert data.model_copy(update={"weights": weights}).weights_at(0.0, 600) == (1.0, 1.0)
    with pytest.raises(ManifestError, match=r"data.weights \(line 26\): must name each source: code, books"):
        parse(MIXTURE + b"[data.weights]\ncode = 1\n")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"share = 0.8", b"share = 0.8\ntokens = 4", "data.phases.1 (line 30): needs exactly one of share and tokens"),
        (b"share = 0.8", b"", "data.phases.1 (line 30): needs exactly one of share and tokens"),
        (b"share = 0.8", b"share = 1.5", "data.phases.1.share (line 31): must be less than 1"),
        (b"code = 0", b"songs = 0", "data.phases.1.weights (line 32): must name each source: code, books"),
        (b"books = 1 }", b"books = -1 }", "data.phases.0.weights.books: must be at least 0.0"),
        (b"{ code = 0, books = 1 }", b"{ code = 0, books = 0 }", "set at least one weight above 0"),
        (b"tokens = 1000", b"keepers = 2", "data.phases.1.share (line 31): is a share of the target, which is missing"),
    ],
)
def test_faults_of_phases_are_reported_on_one_line(old: bytes, new: bytes, message: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse((MIXTURE + PHASES + TARGET).replace(old, new, 1))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"weight = 3", b"weight = -1", "data.sources.0.weight (line 20): must be at least 0.0, got -1"),
        (b"weight = 3", b"weight = nan", "data.sources.0.weight (line 20): must be a finite number"),
        (b"weight = 3", b"weight = 1e9", "data.sources.0.weight (line 20): must be at most 1000000.0"),
        (b'"books"', b'"code"', "data.sources.1.name (line 23): is already in use"),
        (b'name = "books"', b"weight = 1", "data (line 15): sources.1.name is missing; add it"),
        (b'"books"', b'"My books"', "data.sources.1.name (line 23): must have 1 to 64 characters"),
        (b'"text"', b'"wiki"', "data.sources.1.source (line 24): must be 'python-stdlib'"),
        (b'path = "books', b'pfad = "books', "unknown key data.sources.1.pfad (line 25); did you mean path?"),
        (
            b'path = "books',
            b'tokenizer = "books',
            "unknown key data.sources.1.tokenizer (line 25); it is data.tokenizer, for all",
        ),
        (b'source = "text"\n', b"", "data.sources.1.source is missing; add it"),
        (b"\n[[data", SINGLE + b"\n[[data", "data.source (line 16): cannot be combined with [[data.sources]]"),
    ],
)
def test_faults_of_a_mixture_are_reported_on_one_line(old: bytes, new: bytes, message: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse(MIXTURE.replace(old, new, 1))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_weights_that_are_all_zero_too_many_sources_and_none_are_refused() -> None:
    one = b'[[data.sources]]\nname = "s%d"\nsource = "python-stdlib"\nweight = %d\n'
    for data, message in (
        (
            b"".join(one % (number, 0) for number in range(2)),
            r"data.sources.0.weight \(line 19\): is 0, like all others",
        ),
        (b"".join(one % (number, 1) for number in range(MAX_SOURCES + 1)), "must have at most 16 entries"),
        (b"", "source is missing; add it"),
    ):
        with pytest.raises(ManifestError, match=message):
            parse(data)
