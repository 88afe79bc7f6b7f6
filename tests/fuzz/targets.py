"""The decoders: the samples of each, and how a frame is handed to the real code."""

import random
from functools import cache

import numpy as np
import torch
from google.protobuf.message import DecodeError

from node.daemon.audits.work_log import InnerState
from node.daemon.state.outer_state import OuterState
from node.model import shape_table
from node.trainer.counters import Counters, Outstanding, StepTotals
from node.trainer.ipc.shared_memory import SharedLayout
from optim.codecs.base import Codec
from optim.errors import OptimError
from protocol import murmur_pb2 as wire
from protocol.audits import FINDING_KIND, BlobName, Conditions, Finding, WorkRecord, WorkTrace, open_finding
from protocol.blobs.blob import Blob
from protocol.blobs.wire_format import Chunk, compress_piece, decompress_piece, parse_chunk
from protocol.consensus.messages.briefs import SeenMessages, make_brief, restore
from protocol.consensus.messages.kinds import parse
from protocol.electorate import OPEN, Electorate
from protocol.errors import PeerFault
from protocol.manifest.reading import parse_manifest
from protocol.membership.dht_storage import KIND as RENDEZVOUS
from protocol.membership.dht_storage import parse_announcement
from protocol.membership.peer_table import PeerTable
from protocol.membership.rendezvous import parse_public_run
from protocol.membership.summary import Summary
from protocol.signing import open_signed_manifest, sign, sign_manifest
from protocol.steering import open_revision
from tests.fuzz.frames import Target, changed_bytes, changed_json, changed_manifest, signed_frames, with_signed
from tests.fuzz.mutate import mutate_message
from tests.fuzz.samples import IDENTITIES, LIMITS, NAMES, REVISION, wire_bodies
from tests.fuzz.servicers import servicer_targets
from tests.node.small_run import MANIFEST, METHOD, NUMEL, PROGRAM, RUN_ID
from tests.optim.codecs.test_base import CODECS, sample

NOW = 1_800_000_000.0
CODEC_NUMEL = 500


def consensus_targets() -> list[Target]:
    bodies = wire_bodies()
    seen = SeenMessages()
    envelopes = [sign(IDENTITIES[0], kind, RUN_ID, body) for kind, body in bodies]
    for signed in envelopes:
        seen.record(signed)
    briefs = [brief for signed in envelopes if (brief := make_brief(signed, seen)) is not None]

    def draw_brief(draw: random.Random) -> bytes:
        brief = wire.Brief()
        brief.CopyFrom(draw.choice(briefs))
        mutate_message(brief, draw)
        return brief.SerializeToString()

    def read_brief(raw: bytes) -> None:
        signed = restore(wire.Brief.FromString(raw), seen)
        if signed is not None:
            parse(signed, RUN_ID, LIMITS)

    revision = [(REVISION[0], REVISION[1]())]
    return [
        Target("round messages", signed_frames(bodies), with_signed(lambda signed: parse(signed, RUN_ID, LIMITS)), 8),
        Target("briefs", draw_brief, read_brief, 3),
        Target("revisions", signed_frames(revision), with_signed(lambda s: open_revision(s, RUN_ID, NAMES[0]))),
    ]


def membership_targets() -> list[Target]:
    record = wire.PeerRecord(
        sequence=int(NOW * 1000), expires=NOW + 10, role="trainer", device="cpu", name="mary", version="0.1",
        addresses=[f"/ip4/10.0.0.1/tcp/4001/p2p/{NAMES[0]}"], round=3, loss=2.5,
    )  # fmt: skip
    run = wire.PublicRun(run=bytes.fromhex(RUN_ID), expires=NOW + 10, name="small", recipe="diloco", parameters=1000,
        link="https://run.example.org/run.toml",
    )  # fmt: skip
    table = PeerTable(RUN_ID, 15.0, 64)
    summary = Summary.of({name: 5 for name in NAMES}, b"12345678")

    def read_summary(raw: bytes) -> None:
        request = wire.GossipRequest.FromString(raw)
        Summary.from_bytes(request.salt, request.known, 64).compare({name: 6 for name in NAMES})

    def make_summary(draw: random.Random) -> bytes:
        request = wire.GossipRequest(salt=summary.salt, known=summary.to_bytes())
        mutate_message(request, draw)
        return request.SerializeToString()

    return [
        Target("peer records", signed_frames([("peer", record)]), with_signed(lambda s: table.merge(s, NOW)), 4),
        Target("gossip summaries", make_summary, read_summary, 2),
        Target("announcements", signed_frames([(RENDEZVOUS, record)]), lambda raw: parse_announcement(raw, RUN_ID), 2),
        Target("public runs", signed_frames([("run", run)]), parse_public_run, 2),
    ]


def audit_targets() -> list[Target]:
    finding = Finding(3, bytes(32), NAMES[0], bytes(32), "different").to_wire()
    name = BlobName.of(Blob.of(b"state"))
    record = WorkRecord(
        round=3, position=9, before=name, after=name, previous=name, trace=WorkTrace(steps=5),
        conditions=Conditions(device="cpu", threads=1, microbatch=8),
    )  # fmt: skip
    layout = SharedLayout.of(PROGRAM)
    vectors = {name: torch.zeros(size) for name, size in layout.vectors}
    counters = Counters(messages=1, outstanding=Outstanding(serial=1, round=0, sizes=(3,), work=StepTotals()))
    state = b"".join(map(bytes, InnerState(counters, vectors, b"abc").to_bytes()))
    outer = b"".join(map(bytes, OuterState.initial(torch.zeros(NUMEL), METHOD).byte_views()))
    voters = frozenset(NAMES)
    electorate = Electorate(OPEN, 9, voters, dict.fromkeys(NAMES, 5), (3, 4), frozenset(NAMES[:1])).to_bytes()
    return [
        Target("findings", signed_frames([(FINDING_KIND, finding)]), with_signed(lambda s: open_finding(s, RUN_ID))),
        Target("work records", changed_json(record.to_bytes()), WorkRecord.from_bytes, 2),
        Target("inner states", changed_bytes([state]), lambda raw: InnerState.from_bytes(bytearray(raw), layout), 2),
        Target("outer states", changed_bytes([outer]), lambda raw: _read_outer(raw), 2),
        Target("electorates", changed_json(electorate), lambda raw: Electorate.from_bytes(raw, OPEN), 2),
    ]


def _read_outer(raw: bytes) -> None:
    OuterState.from_bytes(bytearray(raw), NUMEL, METHOD)


def blob_targets() -> list[Target]:
    draw = np.random.default_rng(0)
    values = draw.standard_normal(1 << 14).astype(np.float32).tobytes()
    packed = compress_piece(values)
    assert packed is not None
    chunks = [Chunk(b"x" * 40).serialize(), Chunk(b"y" * 40, 80).serialize()]
    return [
        Target("zstd pieces", changed_bytes([packed]), lambda raw: decompress_piece(raw, len(values)), 2),
        Target("chunks", changed_bytes(chunks), parse_chunk, 2, (PeerFault, DecodeError)),
    ]


def codec_target(codec: Codec) -> Target:
    payloads = [bytes(codec.encode(sample(CODEC_NUMEL, seed))) for seed in range(3)]

    def decode(raw: bytes) -> None:
        out = np.zeros(CODEC_NUMEL, np.float32)
        codec.decode_vector(raw, CODEC_NUMEL).add_to(out, 1.0)

    return Target(f"codec {codec}"[:60], changed_bytes(payloads), decode, 1, (OptimError,))


def manifest_targets() -> list[Target]:
    text = MANIFEST.to_toml().encode()
    signed = sign_manifest(MANIFEST, IDENTITIES[0])

    def read(raw: bytes) -> None:
        shape_table(parse_manifest(raw, "fuzz").model)

    return [
        Target("manifests", changed_manifest(text), read),
        Target("signed manifests", changed_bytes([signed]), lambda raw: open_signed_manifest(raw, "fuzz")),
    ]


@cache
def all_targets() -> tuple[Target, ...]:
    received = (*consensus_targets(), *servicer_targets(), *membership_targets())
    stored = (*audit_targets(), *blob_targets(), *manifest_targets())
    return (*received, *stored, *(codec_target(codec) for codec in CODECS))
