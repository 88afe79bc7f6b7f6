"""Announcements of public runs in the DHT: small signed records that expire. No I/O.

An announcement costs its reader little and can do nothing: its fields are few, short and printable, and its link has a
form that `murmur join` takes, where the manifest is checked again. The organiser signs it for the run that it names.
"""

import math
import re

from protocol.errors import MalformedError, StaleError
from protocol.identity import Identity, PeerId
from protocol.membership.dht_storage import Announcement, Topic, parse_envelope
from protocol.murmur_pb2 import PublicRun
from protocol.signing import read_unverified, sign, verify_signed

KIND = "run"
LIFETIME_SECONDS = 300.0
MAX_VALUE_BYTES = 1024
MAX_LINK_CHARACTERS = 400
RUN_BYTES = 32
NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
LINK_PATTERN = re.compile(r"(https?://|murmur://(?P<run>[0-9a-f]{64})@/)[!-~]+")


def make_run_announcement(identity: Identity, run: PublicRun, now: float) -> Announcement:
    """Sign a run, given without its expiry, at a swarm time.

    Raises MalformedError if peers would refuse it.
    """
    dated = PublicRun()
    dated.CopyFrom(run)
    dated.expires = now + LIFETIME_SECONDS
    value = sign(identity, KIND, run.run.hex(), dated).SerializeToString()
    return parse_run_announcement(value)


def parse_public_run(value: bytes) -> tuple[PeerId, PublicRun]:
    """Return the organiser and its announcement; raise MalformedError or ForgedError."""
    signed = parse_envelope(value, MAX_VALUE_BYTES, "the announcement of a run")
    run = read_unverified(signed, KIND, PublicRun, MAX_VALUE_BYTES)
    _check(run)
    verify_signed(signed, run.run.hex())
    return signed.peer, run


def require_current(run: PublicRun, now: float, tolerance: float) -> None:
    """Raise StaleError if an announcement has expired or lasts too long."""
    if not now < run.expires <= now + LIFETIME_SECONDS + tolerance:
        raise StaleError(f"the announcement of the run {run.name} expires in {run.expires - now:.0f} s")


def parse_run_announcement(value: bytes) -> Announcement:
    organiser, run = parse_public_run(value)
    return Announcement(f"{organiser}/{run.run.hex()[:16]}", value, run.expires)


def _check(run: PublicRun) -> None:
    if len(run.run) != RUN_BYTES:
        raise MalformedError("the announcement of a run has no run id")
    if not NAME_PATTERN.fullmatch(run.name) or not NAME_PATTERN.fullmatch(run.recipe):
        raise MalformedError("the announcement of a run has an invalid name")
    match = LINK_PATTERN.fullmatch(run.link)
    if match is None or len(run.link) > MAX_LINK_CHARACTERS:
        raise MalformedError(f"the announcement of the run {run.name} has an invalid link")
    if match["run"] not in (None, run.run.hex()):
        raise MalformedError(f"the announcement of the run {run.name} has a link to another run")
    if not math.isfinite(run.expires):
        raise MalformedError(f"the announcement of the run {run.name} has no expiry")


PUBLIC_RUNS_TOPIC = Topic("public runs", parse_run_announcement)
