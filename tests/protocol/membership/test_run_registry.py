"""Notices of public runs: a sound one is read back, each hostile one is refused, by its reader and its keeper."""

from typing import Any

import pytest
from hivemind.dht.crypto import DHTRecord
from hivemind.utils import MSGPackSerializer

from protocol.errors import ForgedError, MalformedError, PeerFault, StaleError
from protocol.identity import Identity
from protocol.membership.dht_storage import EXPIRATION_OFFSET_SECONDS, AnnouncementValidator
from protocol.membership.run_registry import (
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


def signed_anyhow(
    run: PublicRun, kind: str = KIND, run_id: str = RUN, expires: float = NOW + LIFETIME_SECONDS
) -> bytes:
    """As somebody signs it who does not check."""
    dated = PublicRun()
    dated.CopyFrom(run)
    dated.expires = expires
    return sign(ORGANISER, kind, run_id, dated).SerializeToString()


def test_a_sound_notice_is_read_back() -> None:
    notice = make_run_announcement(ORGANISER, run_of(), NOW)
    organiser, run = parse_public_run(notice.value)
    assert organiser == ORGANISER.peer_id and (run.name, run.peers, run.link) == ("demo", 12, LINK)
    assert (
        notice.subkey == f"{ORGANISER.peer_id}/{RUN[:16]}"
        and notice.dht_expiration == EXPIRATION_OFFSET_SECONDS + NOW + LIFETIME_SECONDS
    )
    require_current(run, NOW, 60.0)
    for web in ("https://run.example.org/run.toml", "http://192.0.2.10:8080/run.toml"):
        assert parse_public_run(make_run_announcement(ORGANISER, run_of(link=web), NOW).value)[1].link == web


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
def test_hostile_notices_are_refused_though_signed(run: PublicRun) -> None:
    with pytest.raises(MalformedError):
        parse_run_announcement(signed_anyhow(run))
    with pytest.raises(PeerFault):
        make_run_announcement(ORGANISER, run, NOW)


def test_forged_and_foreign_notices_are_refused() -> None:
    """The control is the sound one, which the same reader takes."""
    sound = signed_anyhow(run_of())
    assert parse_run_announcement(sound)
    altered = Signed.FromString(sound)
    altered.body = altered.body.replace(b"demo", b"dem0")
    stolen = Signed.FromString(sound)
    stolen.peer = Identity.create().peer_id
    for value in (altered.SerializeToString(), stolen.SerializeToString(), signed_anyhow(run_of(), run_id="cd" * 32)):
        with pytest.raises(ForgedError):
            parse_run_announcement(value)
    for value in (b"", b"\xff", bytes(MAX_VALUE_BYTES + 1), signed_anyhow(run_of(), kind="rendezvous")):
        with pytest.raises(MalformedError):
            parse_run_announcement(value)


@pytest.mark.parametrize("expires", [NOW - 1, NOW + 1e6, float("inf"), float("nan")])
def test_what_is_over_or_would_stay_for_ever_is_refused(expires: float) -> None:
    with pytest.raises(PeerFault):
        _, run = parse_public_run(signed_anyhow(run_of(), expires=expires))
        require_current(run, NOW, 60.0)
    with pytest.raises(StaleError):
        require_current(parse_public_run(signed_anyhow(run_of()))[1], NOW + LIFETIME_SECONDS + 1, 60.0)


def test_a_node_keeps_only_what_is_sound_and_in_its_own_place() -> None:
    notice, check = make_run_announcement(ORGANISER, run_of(), NOW), AnnouncementValidator([PUBLIC_RUNS_TOPIC])

    def record(**changes: Any) -> DHTRecord:
        fields = {
            "key": PUBLIC_RUNS_TOPIC.key.to_bytes(),
            "subkey": MSGPackSerializer.dumps(notice.subkey),
            "value": notice.value,
            "expiration_time": notice.dht_expiration,
        }
        return DHTRecord(**{**fields, **changes})

    assert check.validate(record())
    other = MSGPackSerializer.dumps(f"{Identity.create().peer_id}/{RUN[:16]}")
    hostile = signed_anyhow(HOSTILE["a name with control characters"])
    bad = [record(subkey=other), record(expiration_time=notice.dht_expiration + 1e6), record(value=hostile)]
    assert not any(check.validate(each) for each in bad) and check.refused_count == len(bad)
