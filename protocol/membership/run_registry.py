"""Runs that anyone may join, as their organisers announce them: small signed notices in the DHT that expire. PURE.

A notice costs its reader little and can do nothing: its fields are few, short and printable, and its link is of a form
that `murmur join` takes, where the manifest is checked anew. The organiser signs it, under the run that it is of.
"""

import math
import re

from protocol.errors import MalformedError, StaleError
from protocol.identity import Identity, PeerId
from protocol.membership.dht_storage import Announcement, Topic, parse_envelope
from protocol.murmur_pb2 import PublicRun
from protocol.signing import read_unverified, sign, verify_signed

KIND = "run"
LIFETIME_SECONDS = 300.0  # seconds
MAX_VALUE_BYTES = 1024
MAX_LINK_CHARACTERS = 400
RUN_BYTES = 32
NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
LINK_PATTERN = re.compile(r"(https?://|murmur://(?P<run>[0-9a-f]{64})@/)[!-~]+")


def make_run_announcement(identity: Identity, run: PublicRun, now: float) -> Announcement:
    """`run` without its expiry; `now` in swarm time. Raises MalformedError for what no peer would accept."""
    dated = PublicRun()
    dated.CopyFrom(run)
    dated.expires = now + LIFETIME_SECONDS
    value = sign(identity, KIND, run.run.hex(), dated).SerializeToString()
    return parse_run_announcement(value)


def parse_public_run(value: bytes) -> tuple[PeerId, PublicRun]:
    """The organiser and what it says. Raises MalformedError or ForgedError."""
    signed = parse_envelope(value, MAX_VALUE_BYTES, "the notice of a run")
    run = read_unverified(signed, KIND, PublicRun, MAX_VALUE_BYTES)
    _check(run)
    verify_signed(signed, run.run.hex())
    return signed.peer, run


def require_current(run: PublicRun, now: float, tolerance: float) -> None:
    """StaleError for a notice that is over, or is to last longer than any may."""
    if not now < run.expires <= now + LIFETIME_SECONDS + tolerance:
        raise StaleError(f"the notice of the run {run.name} expires in {run.expires - now:.0f} s")


def parse_run_announcement(value: bytes) -> Announcement:
    organiser, run = parse_public_run(value)
    return Announcement(f"{organiser}/{run.run.hex()[:16]}", value, run.expires)


def _check(run: PublicRun) -> None:
    if len(run.run) != RUN_BYTES:
        raise MalformedError("the notice of a run does not say which")
    if not NAME_PATTERN.fullmatch(run.name) or not NAME_PATTERN.fullmatch(run.recipe):
        raise MalformedError("the notice of a run has a name that is none")
    found = LINK_PATTERN.fullmatch(run.link)
    if found is None or len(run.link) > MAX_LINK_CHARACTERS:
        raise MalformedError(f"the notice of the run {run.name} has a link that is none")
    if found["run"] not in (None, run.run.hex()):
        raise MalformedError(f"the notice of the run {run.name} has a link to another run")
    if not math.isfinite(run.expires):
        raise MalformedError(f"the notice of the run {run.name} has no time")


PUBLIC_RUNS_TOPIC = Topic("public runs", parse_run_announcement)
