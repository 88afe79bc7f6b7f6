"""The explanation of a wrong exact step names the microbatch by which a sum differs."""

from pathlib import Path

import pytest

from benchmarks.pipelining.exact_difference import check_sum
from benchmarks.pipelining.exact_reference import SingleProcess
from optim.exact import Float64Sum
from protocol.blobs.blob import Blob
from protocol.consensus.messages.contributions import Contribution
from protocol.manifest.reading import load_manifest
from protocol.pipeline.ledger import StepLedger

pytestmark = pytest.mark.slow
RUN = Path(__file__).parents[1] / "swarm" / "stages" / "exact.toml"


def test_wrong_sum_is_explained_by_its_microbatch(tmp_path: Path) -> None:
    whole = SingleProcess(load_manifest(RUN), tmp_path)
    (tmp_path / "peer" / "blobs").mkdir(parents=True)
    right, double = whole.sums(0, [0, 2])[1], whole.sums(0, [2])[1]

    def lines(total: object, is_kept: bool = True) -> list[str]:
        payload = Float64Sum().encode_sum(total)  # type: ignore[arg-type]
        blob = Blob.of(payload)
        if is_kept:
            (tmp_path / "peer" / "blobs" / blob.name).write_bytes(payload)
        ledger = StepLedger.of(whole.count, [0, 2]).to_bytes()
        body = Contribution(0, b"", "", b"", 1, 1, 0.0, (blob,), ledger=ledger)
        return list(check_sum(whole, tmp_path, 0, 1, body))

    assert lines(right) == []
    assert lines(right + double) == [
        "a sum of the microbatches [0, 2] has other bytes: microbatch 2 is counted once too often"
    ]
    assert lines(right - double)[0].endswith("microbatch 2 is missing")
    assert lines(1.5 * right)[0].endswith("by no single microbatch")
    assert lines(2 * right, is_kept=False)[0].endswith("has other bytes")
