"""A node whose port is left to chance takes that of its last start, so that the links which others have stay true."""

import logging
import socket
from collections.abc import Sequence

from node.folder import RunDir
from protocol.errors import PortTakenError
from protocol.network.ports import retry_while_port_taken

logger = logging.getLogger(__name__)


async def reuse_last_port(run_dir: RunDir, listen: Sequence[str]) -> tuple[str, ...]:
    """A port left to chance is the one of the last start, where that can still be had: links stay true."""
    port = run_dir.read_last_port()
    usual = tuple(address.replace("/tcp/0", f"/tcp/{port}") for address in listen)
    if not port or usual == tuple(listen):
        return tuple(listen)

    async def claim() -> None:
        if not is_port_free(port):
            raise PortTakenError(f"another program has port {port}, which was ours")

    try:
        await retry_while_port_taken(claim)
    except PortTakenError as error:
        logger.warning("%s; taking another: links to this node change", error)
        return tuple(listen)
    return usual


def is_port_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True
