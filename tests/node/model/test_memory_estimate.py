"""What fits into how much memory."""

import pytest

from node.model.memory_estimate import fit_microbatch, fixed_bytes, max_microbatch, sequence_bytes
from protocol.errors import DeviceError
from tests.node.small_run import MANIFEST


def room_for(sequences: int) -> int:
    return fixed_bytes(MANIFEST, "cpu") + sequences * sequence_bytes(MANIFEST, "cpu")


def test_more_memory_takes_larger_microbatches() -> None:
    sizes = [max_microbatch(MANIFEST, room_for(count), "cpu") for count in (0, 1, 5, 1000, 10**6)]
    assert sizes == [0, 1, 5, 1000, 4096]
    assert max_microbatch(MANIFEST, 0, "cpu") == 0
    assert sequence_bytes(MANIFEST, "cuda") < sequence_bytes(MANIFEST, "cpu")


def test_the_runs_own_is_never_exceeded() -> None:
    own = MANIFEST.train.microbatch
    assert fit_microbatch(MANIFEST, None, "cpu") == own
    assert fit_microbatch(MANIFEST, room_for(10 * own), "cpu") == own
    assert fit_microbatch(MANIFEST, room_for(own - 1), "cpu") == own - 1


def test_what_does_not_fit_is_refused_and_what_the_refusal_names_is_enough() -> None:
    with pytest.raises(DeviceError, match=r"--memory: 1 MB are too little .*; allow (\d+)MB") as refused:
        fit_microbatch(MANIFEST, 1_000_000, "cpu")
    named = int(str(refused.value).rpartition("allow ")[2].partition("MB")[0])
    assert fit_microbatch(MANIFEST, (named + 1) * 1_000_000, "cpu") >= 1
