"""Which work an auditor repeats, and how it compares it: bit by bit on its own kind of device, by distance on CPUs."""

from dataclasses import replace

import pytest
import torch

from node.daemon.audits.repeater import TOLERANCE, RepeatedWork, distance
from node.daemon.audits.screening import RecordCheck
from protocol.audits import BlobName, Conditions, WorkRecord, WorkTrace
from protocol.blobs.blob import Blob
from protocol.consensus.chain import genesis_head
from tests.node.small_run import PROGRAM, RUN_ID, contribution_of

BLOB = Blob.of(b"part")
STATE = BlobName.of(Blob.of(b"state"))
CONTRIBUTION = contribution_of(genesis_head(RUN_ID), [BLOB])
INTEL, AMD, CARD = "cpu GenuineIntel AVX512 torch 2", "cpu AuthenticAMD AVX2 torch 2", "cuda H200 torch 2"


def record_on(device: str) -> WorkRecord:
    return WorkRecord(
        round=0, position=0, before=STATE, after=STATE, previous=None, trace=WorkTrace(),
        conditions=Conditions(device=device),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("own", "theirs", "is_other", "lack"),
    [
        (INTEL, INTEL, False, ""),
        (INTEL, AMD, True, ""),
        (CARD, CARD, False, ""),
        (INTEL, CARD, True, "another kind of device"),
        (CARD, INTEL, True, "another kind of device"),
        (f"compiled {CARD}", f"compiled {CARD}", False, "another way of training"),
        (INTEL, f"2 ranks {CARD}", True, "another way of training"),
    ],
)
def test_work_is_compared_on_the_same_kind_and_between_cpus(own: str, theirs: str, is_other: bool, lack: str) -> None:
    """An audit repeats compiled steps as plain ones, so two compiled peers must not compare bits."""
    check, record = RecordCheck(PROGRAM, Conditions(device=own), 1 << 20), record_on(theirs)
    outcome = check.check(record, CONTRIBUTION, ())
    assert (outcome.reason if outcome else "") == lack and check.is_other_kind(record) == is_other


@pytest.mark.parametrize(
    ("changes", "gap", "word"),
    [
        ({}, 0.0, ""),
        ({}, TOLERANCE, ""),
        ({}, TOLERANCE * 1.01, "values"),
        ({}, 1e9, "values"),
        ({"tokens": 99}, 0.0, "counts"),
        ({"steps": 4}, 0.0, "counts"),
        ({"loss": 3.1}, 0.0, ""),
        ({"loss": 3.3}, 0.0, "loss"),
    ],
)
def test_work_of_another_kind_may_differ_as_kinds_do(changes: dict[str, float], gap: float, word: str) -> None:
    repeated = RepeatedWork(parts=(STATE,), tokens=100, steps=5, loss=3.0, after=STATE)
    claimed = replace(CONTRIBUTION, **changes)  # type: ignore[arg-type]
    assert word in repeated.find_false(claimed, gap) and bool(repeated.find_false(claimed, gap)) == bool(word)


def test_distance_is_a_share_of_what_is_expected() -> None:
    expected = torch.tensor([3.0, 4.0])
    assert distance(expected, expected) == 0 and distance(-expected, expected) == 2
    assert distance(expected * 1.1, expected) == pytest.approx(0.1)
    assert distance(expected * torch.nan, expected) == torch.inf and distance(expected, torch.zeros(2)) == 5
