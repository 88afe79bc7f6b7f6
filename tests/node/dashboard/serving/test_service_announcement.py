"""The public announcement of a run."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.dashboard.service import DashboardAddress, build_announcement, join_link
from protocol.errors import MalformedError
from protocol.identity import Identity
from protocol.membership.rendezvous import parse_public_run
from tests.node.dashboard.example_events import apply_all, committed, opening_events
from tests.node.small_run import MANIFEST, RUN_ID

ORGANISER = Identity.create()
NEAR, FAR = (f"/ip4/{host}/tcp/4001/p2p/{ORGANISER.peer_id}" for host in ("127.0.0.1", "203.0.113.7"))
ADDRESS = DashboardAddress("0.0.0.0", 8080)


class FakeTransport:
    async def addresses(self) -> tuple[str, ...]:
        return NEAR, FAR


def fake_handle() -> Any:
    return cast(Any, SimpleNamespace(manifest=MANIFEST, identity=ORGANISER, transport=FakeTransport()))


async def test_announcement_has_the_progress_and_a_join_link() -> None:
    state = apply_all([*opening_events(), *map(committed, range(4))])
    notice = await build_announcement(fake_handle(), state, ADDRESS, 1000.0)
    organiser, run = parse_public_run(notice.value)
    assert organiser == ORGANISER.peer_id and run.run.hex() == RUN_ID
    assert (run.name, run.recipe, run.peers, run.round, run.tokens) == ("small", "diloco", 2, 4, 800)
    assert run.link == f"murmur://{RUN_ID}@{FAR}", "not the address that only this machine has"


async def test_public_url_is_preferred_as_link() -> None:
    address = DashboardAddress("127.0.0.1", 8080, "https://run.example.org")
    notice = await build_announcement(fake_handle(), apply_all(opening_events()), address, 1000.0)
    assert parse_public_run(notice.value)[1].link == "https://run.example.org/run.toml"
    assert join_link(RUN_ID, [NEAR], ADDRESS).endswith(NEAR)


async def test_invalid_announcement_is_not_sent() -> None:
    with pytest.raises(MalformedError, match="an invalid link"):
        await build_announcement(
            fake_handle(), apply_all(opening_events()), DashboardAddress("h", 1, "https://run.example.org/a b"), 1000.0
        )
