"""Announcements of public runs: a valid one is read back, each hostile one is refused by readers and DHT nodes."""

from typing import Any

import pytest
from hivemind.dht.crypto import DHTRecord
from hivemind.utils import MSGPackSerializer

from protocol.errors import ForgedError, MalformedError, PeerFault, StaleError
from protocol.identity import Identity
from protocol.membership.dht_storage import EXPIRATION_OFFSET_SECONDS, AnnouncementValidator
from protocol.membership.rendezvous import (
    KIND,
    LIFETIME_SECONDS,
    MAX_VALUE_BYTES,
    PUBLIC_RUNS_TOPIC,
    make_run_announcement,
    parse_public_run,
    parse_run_announcement,
    require_current,
)
from protocol.murmur_pb2 import PublicRun, Signed
from protocol.signing import sign

NOW = 1_800_000_000.0
RUN = "ab" * 32
ORGANISER = Identity.create()
LINK = f"murmur://{RUN}@/ip4/203.0.113.7/tcp/4001/p2p/{ORGANISER.peer_id}"


def run_of(**changes: Any) -> PublicRun:
    fields = {
        "run": bytes.fromhex(RUN),
        "name": "demo",
        "recipe": "frugal",
        "parameters": 824_448,
        "peers": 12,
        "round": 30,
        "target_rounds": 400,
        "link": LINK,
    }
    return PublicRun(**{**fields, **changes})


def sign_unchecked(
    run: PublicRun, kind: str = KIND, run_id: str = RUN, expires: float = NOW + LIFETIME_SECONDS
) -> bytes:
    """Sign a run without checking it."""
    dated = PublicRun()
    dated.CopyFrom(run)
    dated.expires = expires
    return sign(ORGANISER, kind, run_id, dated).SerializeToString()


def test_valid_announcement_is_read_back() -> None:
    announcement = make_run_announcement(ORGANISER, run_of(), NOW)
    organiser, run = parse_public_run(announcement.value)
    assert organiser == ORGANISER.peer_id and (run.name, run.peers, run.link) == ("demo", 12, LINK)
    assert (
        announcement.subkey == f"{ORGANISER.peer_id}/{RUN[:16]}"
        and announcement.dht_expiration == EXPIRATION_OFFSET_SECONDS + NOW + LIFETIME_SECONDS
    )
    require_current(run, NOW, 60.0)
    for link in ("https://run.example.org/run.toml", "http://192.0.2.10:8080/run.toml"):
        assert parse_public_run(make_run_announcement(ORGANISER, run_of(link=link), NOW).value)[1].link == link


HOSTILE = {
    "a name with control characters": run_of(name="demo\x1b[2J"),
    "a name that is too long": run_of(name="x" * 65),
    "no name": run_of(name=""),
    "a recipe with control characters": run_of(recipe="a\nb"),
    "a link with control characters": run_of(link=LINK + "\x07"),
    "a link with a space and an option": run_of(link="https://x --insecure"),
    "a link to a file": run_of(link="file:///etc/passwd"),
    "a link to another run": run_of(link=LINK.replace("ab", "cd")),
    "a link that is too long": run_of(link="https://" + "x" * 500),
    "no run": run_of(run=b""),
    "a body beyond all bounds": run_of(link="https://" + "x" * 4000),
}


@pytest.mark.parametrize("run", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_announcements_are_refused_though_signed(run: PublicRun) -> None:
    with pytest.raises(MalformedError):
        parse_run_announcement(sign_unchecked(run))
    with pytest.raises(PeerFault):
        make_run_announcement(ORGANISER, run, NOW)


def test_forged_and_foreign_announcements_are_refused() -> None:
    """The control is the valid announcement, which the same reader accepts."""
    valid = sign_unchecked(run_of())
    assert parse_run_announcement(valid)
    altered = Signed.FromString(valid)
    altered.body = altered.body.replace(b"demo", b"dem0")
    stolen = Signed.FromString(valid)
    stolen.peer = Identity.create().peer_id
    for value in (altered.SerializeToString(), stolen.SerializeToString(), sign_unchecked(run_of(), run_id="cd" * 32)):
        with pytest.raises(ForgedError):
            parse_run_announcement(value)
    for value in (b"", b"\xff", bytes(MAX_VALUE_BYTES + 1), sign_unchecked(run_of(), kind="rendezvous")):
        with pytest.raises(MalformedError):
            parse_run_announcement(value)


@pytest.mark.parametrize("expires", [NOW - 1, NOW + 1e6, float("inf"), float("nan")])
def test_expired_or_too_long_lived_announcement_is_refused(expires: float) -> None:
    with pytest.raises(PeerFault):
        _, run = parse_public_run(sign_unchecked(run_of(), expires=expires))
        require_current(run, NOW, 60.0)
    with pytest.raises(StaleError):
        require_current(parse_public_run(sign_unchecked(run_of()))[1], NOW + LIFETIME_SECONDS + 1, 60.0)


def test_node_stores_only_valid_announcements_under_their_own_subkey() -> None:
    announcement, validator = (
        make_run_announcement(ORGANISER, run_of(), NOW),
        AnnouncementValidator([PUBLIC_RUNS_TOPIC]),
    )

    def record(**changes: Any) -> DHTRecord:
        fields = {
            "key": PUBLIC_RUNS_TOPIC.key.to_bytes(),
            "subkey": MSGPackSerializer.dumps(announcement.subkey),
            "value": announcement.value,
            "expiration_time": announcement.dht_expiration,
        }
        return DHTRecord(**{**fields, **changes})

    assert validator.validate(record())
    other = MSGPackSerializer.dumps(f"{Identity.create().peer_id}/{RUN[:16]}")
    hostile = sign_unchecked(HOSTILE["a name with control characters"])
    bad = [record(subkey=other), record(expiration_time=announcement.dht_expiration + 1e6), record(value=hostile)]
    assert not any(validator.validate(entry) for entry in bad) and validator.refused_count == len(bad)
