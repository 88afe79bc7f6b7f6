"""What a host that asks for it announces to everybody: its run, how far it is, and the link to join by."""

from node.host.hosting import Door, reachable_first
from node.host.state import State
from node.host.window import Window
from node.model import shape_table
from protocol.membership.board import Notice
from protocol.membership.public_runs import notice_of
from protocol.murmur_pb2 import PublicRun


async def advertisement(window: Window, state: State, door: Door, now: float) -> Notice:
    """`now` in swarm time. Raises TransportError while our own addresses cannot be read."""
    manifest, last = window.manifest, state.rows.last
    run = PublicRun(
        run=bytes.fromhex(manifest.run_id),
        name=manifest.run.name,
        recipe=manifest.method.recipe,
        parameters=shape_table(manifest.model).numel,
        peers=len(state.trainers),
        round=last.round + 1 if last else 0,
        target_rounds=manifest.target.rounds or 0,
        tokens=last.tokens if last else 0,
        target_tokens=manifest.target.tokens or 0,
        link=link_to(manifest.run_id, reachable_first(await window.transport.addresses()), door),
    )
    return notice_of(window.identity, run, now)


def link_to(run_id: str, addresses: list[str], door: Door) -> str:
    """The page where it has a public address; else the run by its id, at one of ours."""
    if door.public_url is not None or not addresses:
        return f"{door.public_url}/run.toml"
    return f"murmur://{run_id}@{addresses[0]}"
