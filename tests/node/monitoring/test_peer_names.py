"""Names in place of peer ids."""

from node.monitoring.peer_lines import MAX_SHOWN_CHARACTERS, PeerNames
from protocol.identity import Identity
from protocol.membership.peer_table import PeerJoined, PeerUpdated
from protocol.murmur_pb2 import PeerRecord

MARY, TOM = (Identity.create().peer_id for _ in range(2))


def test_names_stand_before_short_ids() -> None:
    names = PeerNames()
    names.on_membership_changed([PeerJoined(MARY, PeerRecord(name="mary"))])
    names.on_membership_changed([PeerJoined(TOM, PeerRecord())])
    assert names.replace_ids(f"{MARY} left, {TOM} joined") == f"mary (12D3..{MARY[-6:]}) left, 12D3..{TOM[-6:]} joined"


def test_addresses_keep_their_host_and_lose_the_id() -> None:
    address = f"/ip4/192.0.2.1/tcp/4001/p2p/{MARY}"
    assert PeerNames().replace_ids(f"no answer from {MARY} at {address}") == (
        f"no answer from 12D3..{MARY[-6:]} at /ip4/192.0.2.1/tcp/4001"
    )


def test_digests_are_shortened() -> None:
    assert (
        PeerNames().replace_ids(f"blob {'be1ab856' * 8} is gone, be1ab856 stays")
        == "blob be1ab856.. is gone, be1ab856 stays"
    )


def test_new_name_replaces_the_old_one_and_is_cut() -> None:
    names = PeerNames()
    names.on_membership_changed([PeerJoined(MARY, PeerRecord(name="mary"))])
    names.on_membership_changed([PeerUpdated(MARY, PeerRecord(name="m" * 60))])
    assert names.label(MARY).startswith("m" * MAX_SHOWN_CHARACTERS + " (")
    names.on_membership_changed([PeerUpdated(MARY, PeerRecord())])
    assert names.label(MARY) == f"12D3..{MARY[-6:]}"
