"""Blobs that several contributions name, or one of them as several parts: what they are held as is what counts."""

from dataclasses import replace

import pytest

from protocol.blobs.blob import Blob
from protocol.consensus.events import Fetch, LocalContribution, Reduce
from protocol.consensus.messages.contributions import PartBlob
from protocol.identity import PeerId
from tests.protocol.consensus.cluster import BASE, Cluster
from tests.simulation.bugs import counts_as_held_by_the_digest_alone
from tests.simulation.virtual.network import fake_reduce, make_contribution

BOTH = pytest.mark.parametrize(("exchange", "parts"), [("gather", 1), ("butterfly", 4)])


def contribute(table: Cluster, name: PeerId, *parts: Blob) -> None:
    table.stores[name].update(blob.digest for blob in parts)
    table.feed_event(name, LocalContribution(replace(make_contribution(name, 0, BASE, table.scenario), parts=parts)))
    table.deliver_all()


def shorter(blob: Blob) -> Blob:
    return Blob(blob.digest, blob.size - 1)


def _with_a_size_conflict(exchange: str, parts: int, comes_first: bool) -> tuple[Cluster, PeerId]:
    table = Cluster(4, exchange, parts)
    twin, honest = table.names[3], table.names[1]
    copies = tuple(shorter(blob) for blob in table.blobs_of_contribution(honest))
    table.invalid_parts = {PartBlob(blob, part) for part, blob in enumerate(copies)}
    if comes_first:
        contribute(table, twin, *copies)
        table.contribute(honest)
    else:
        table.contribute(honest)
        contribute(table, twin, *copies)
    table.contribute(table.names[0], table.names[2])
    table.elapse(5)
    return table, twin


@BOTH
def test_who_names_anothers_blob_with_another_size_is_left_out_alone(exchange: str, parts: int) -> None:
    table, twin = _with_a_size_conflict(exchange, parts, comes_first=False)
    assert table.included_peers() == {tuple(sorted({*table.names} - {twin}))}


def test_also_where_it_comes_first() -> None:
    table, twin = _with_a_size_conflict("gather", 1, comes_first=True)
    assert table.included_peers() == {tuple(sorted({*table.names} - {twin}))}
    fetched = {action.part_blob for name, action in table.log if name == table.names[0] and isinstance(action, Fetch)}
    assert {portion.blob.size for portion in table.invalid_parts} < {portion.blob.size for portion in fetched}


@BOTH
def test_by_the_digest_alone_all_decide_what_nobody_can_apply(
    exchange: str, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts_as_held_by_the_digest_alone(monkeypatch)
    table, _ = _with_a_size_conflict(exchange, parts, comes_first=False)
    assert table.included_peers() == {tuple(sorted(table.names))}


def test_two_sizes_of_one_digest_are_asked_for_once_each() -> None:
    table = Cluster(4, "gather")
    table.is_slow = lambda peer, digest: True
    me, honest, twin, _ = table.names
    table.contribute(honest)
    contribute(table, twin, shorter(table.blobs_of_contribution(honest)[0]))
    table.elapse(1)
    orders = [action for name, action in table.log if name == me and isinstance(action, Fetch)]
    assert [order.sources for order in orders] == [(honest,), (twin,)]


@BOTH
def test_honest_twins_count_both(exchange: str, parts: int) -> None:
    table = Cluster(4, exchange, parts)
    same = table.blobs_of_contribution(table.names[1])
    table.contribute(*table.names[:2])
    for name in table.names[2:]:
        contribute(table, name, *same)
    assert table.included_peers() == {tuple(sorted(table.names))} and table.now == 0


def test_of_what_many_made_all_are_asked() -> None:
    table = Cluster(4, "gather")
    table.is_slow = lambda peer, digest: True
    (same,) = table.blobs_of_contribution(table.names[1])
    for name in table.names[1:]:
        contribute(table, name, same)
    orders = [action for name, action in table.log if name == table.names[0] and isinstance(action, Fetch)]
    assert {*orders[-1].sources} == {*table.names[1:]}


def test_one_blob_may_be_many_parts() -> None:
    """All of them zero, for instance."""
    table = Cluster(3, "butterfly", 6)
    zeros, others = Blob.of(b"zeros"), table.blobs_of_contribution(table.names[1])
    contribute(table, table.names[0], *[zeros] * 6)
    contribute(table, table.names[1], *others[:3], *[zeros] * 3)
    table.contribute(table.names[2])
    assert table.included_peers() == {tuple(sorted(table.names))} and table.now == 0


def _with_the_sum_of_another_part() -> Cluster:
    """A reducer names the sum of somebody else's part as its own, and it does not decode as that."""
    table = Cluster(3, "butterfly", 3, reducers=1)

    def named(name: PeerId, order: Reduce) -> Blob:
        blob = fake_reduce((order.part + 1) % 3 if name == table.names[1] else order.part, order.contributions)
        table.invalid_parts |= {PartBlob(blob, order.part)} if name == table.names[1] else set()
        return blob

    table.reduce_part = named
    table.contribute(*table.names)
    table.elapse(5)
    return table


def test_a_sum_is_acknowledged_only_as_the_part_it_was_checked_as() -> None:
    assert _with_the_sum_of_another_part().included_peers() == set()


def test_by_the_digest_alone_it_would_be_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    counts_as_held_by_the_digest_alone(monkeypatch)
    assert _with_the_sum_of_another_part().included_peers()
