"""What a host that asks for it announces to everybody: its run, how far it is, and the link to join by."""

from node.host.hosting import DashboardAddress, sort_reachable_first
from node.host.state import RunState
from node.host.window import NodeHandle
from node.model import shape_table
from protocol.membership.board import Announcement
from protocol.membership.public_runs import make_run_announcement
from protocol.murmur_pb2 import PublicRun


async def build_announcement(node: NodeHandle, state: RunState, address: DashboardAddress, now: float) -> Announcement:
    """`now` in swarm time. Raises TransportError while our own addresses cannot be read."""
    manifest, last = node.manifest, state.rows.last
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
        link=join_link(manifest.run_id, sort_reachable_first(await node.transport.addresses()), address),
    )
    return make_run_announcement(node.identity, run, now)


def join_link(run_id: str, addresses: list[str], address: DashboardAddress) -> str:
    """The page where it has a public address; else the run by its id, at one of ours."""
    if address.public_url is not None or not addresses:
        return f"{address.public_url}/run.toml"
    return f"murmur://{run_id}@{addresses[0]}"
