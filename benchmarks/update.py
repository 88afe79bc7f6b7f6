"""How long it takes to check what one peer sent before it goes into the sum: milliseconds, by step.

The message is the top-k codec's of 25 million normally distributed values, about half a megabyte. Checked are the
statement (size, form, signature), the blob's hash against it, and every value and index while it is decoded; nothing is
added to a total yet.

    python benchmarks/update.py [--numel 25000000] [--turns 15] [--threads 2] [--json]
"""

import argparse
import hashlib
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from benchmarks.codecs import seconds, tensors
from optim.codecs.topk import ChunkTopK
from protocol.blobs.blob import Blob
from protocol.consensus.messages.contributions import Contribution, ContributionLimits
from protocol.consensus.messages.kinds import kind_of, parse
from protocol.errors import MalformedError
from protocol.identity import Identity
from protocol.signing import sign

RUN_ID = hashlib.sha256(b"one update").hexdigest()
SHAPES = hashlib.sha256(b"one vector").digest()


@dataclass(frozen=True)
class Report:
    """Medians, in milliseconds."""

    bytes: int
    statement: float
    hash: float
    decode: float

    @property
    def total(self) -> float:
        return self.statement + self.hash + self.decode


def measure(numel: int, turns: int) -> Report:
    codec = ChunkTopK().bind(tensors(numel), 0)
    payload = bytes(codec.encode(torch.randn(numel, generator=torch.Generator().manual_seed(0))))
    blob = Blob.of(payload)
    body = Contribution(0, bytes.fromhex(RUN_ID), "topk", SHAPES, 1, 1, 0.0, (blob,))
    # Each by another peer: of one that has been seen it is known that it is genuine.
    statements = iter([sign(Identity.create(), kind_of(body), RUN_ID, body.to_wire()) for _ in range(turns + 1)])
    terms = ContributionLimits("topk", SHAPES, 1, 1 << 40, codec.max_bytes(numel))

    def check_hash() -> None:
        if Blob.of(payload) != blob:
            raise MalformedError("another blob than its sender named")

    steps = (lambda: parse(next(statements), RUN_ID, terms), check_hash, lambda: codec.decode_vector(payload, numel))
    for step in steps:
        seconds(step)
    times = [[seconds(step) for step in steps] for _ in range(turns)]
    return Report(len(payload), *(1000 * statistics.median(column) for column in zip(*times, strict=True)))


def table(report: Report) -> str:
    return (
        f"{report.bytes / 1e6:.2f} MB: {report.total:.1f} ms (statement and signature {report.statement:.2f}, "
        f"hash {report.hash:.2f}, values and indices {report.decode:.2f})"
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args(arguments)
    torch.set_num_threads(words.threads)
    report = measure(words.numel, words.turns)
    print(json.dumps({**asdict(report), "total": report.total}) if words.json else table(report))


if __name__ == "__main__":
    main(sys.argv[1:])
