"""A target of the fuzzing, and how its frames are drawn from valid ones.

A target refuses a frame with an error of the tree in protocol/errors.py, or with the error that its caller expects
(`refusals`). Any other exception is a find.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from protocol import murmur_pb2 as wire
from protocol.errors import MurmurError, PeerFault
from protocol.signing import sign
from tests.fuzz.mutate import mutate_bytes, mutate_json, mutate_message
from tests.fuzz.samples import IDENTITIES
from tests.node.small_run import RUN_ID
from tests.node.test_manifest_fuzz import MUTATIONS


class FrameSource(Protocol):
    def __call__(self, draw: random.Random, /) -> bytes: ...


@dataclass(frozen=True)
class Target:
    """A decoder: `make` draws a frame, `decode` hands it to the code; `weight` is its share of the frames."""

    name: str
    make: FrameSource
    decode: Callable[[bytes], object]
    weight: int = 1
    refusals: tuple[type[Exception], ...] = field(default=(PeerFault, MurmurError, DecodeError))


def signed_frames(samples: Sequence[tuple[str, Any]], run_id: str = RUN_ID) -> FrameSource:
    """Draw signed messages: mostly a changed body under a valid signature, sometimes a changed envelope."""

    def make(draw: random.Random) -> bytes:
        kind, body = draw.choice(samples)
        changed = type(body)()
        changed.CopyFrom(body)
        if draw.random() < 0.8:
            mutate_message(changed, draw)
        signed = sign(draw.choice(IDENTITIES), kind, run_id, changed)
        if draw.random() < 0.2:
            mutate_message(signed, draw)
        return signed.SerializeToString()

    return make


def changed_bytes(samples: Sequence[bytes]) -> FrameSource:
    """Draw changed copies of valid bytes."""
    return lambda draw: mutate_bytes(draw.choice(samples), draw)


def changed_json(sample: bytes) -> FrameSource:
    """Draw changed copies of a JSON document: mostly its values, sometimes its bytes."""
    return lambda draw: (mutate_json if draw.random() < 0.8 else mutate_bytes)(sample, draw)


def changed_manifest(text: bytes) -> FrameSource:
    """Draw manifests with the mutations of `tests/node/test_manifest_fuzz.py`."""
    return lambda draw: draw.choice(MUTATIONS)(text, draw)


def with_signed(function: Callable[[wire.Signed], object]) -> Callable[[bytes], object]:
    return lambda raw: function(wire.Signed.FromString(raw))
