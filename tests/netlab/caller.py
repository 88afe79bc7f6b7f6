"""A peer that calls another one at a given moment, run inside a node: `caller.py FOLDER HOST ADDRESS MEETING WAY`.

MEETING: a file with the moment, by the machine's monotonic clock. WAY: `ours`, or `reuse` for calls from the port on
which it listens, as libp2p does it by itself.
"""

import asyncio
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

from protocol.errors import UnreachableError
from protocol.network import p2pd
from protocol.network.transport import Transport

LOOK = 0.02  # seconds
PORT = 4001
DEADLINE = 10.0


async def call(folder: Path, host: str, address: str, meeting: Path) -> None:
    """Prints a line once it listens, and then what became of the call."""
    transport = await Transport.start(folder / "key", folder, [], listen=[f"/ip4/{host}/tcp/{PORT}"])
    print("here", flush=True)
    while not meeting.exists():
        await asyncio.sleep(LOOK)
    due = float(meeting.read_text())
    await asyncio.sleep(due - time.monotonic())
    trouble = ""
    try:
        await transport.connect(address, DEADLINE)
    except UnreachableError as error:
        trouble = str(error)
    print(json.dumps({"seconds": time.monotonic() - due, "trouble": trouble}), flush=True)
    await asyncio.Event().wait()  # the other end may still be at it


if __name__ == "__main__":
    folder, host, address, meeting, way = sys.argv[1:]
    as_libp2p_does = {**p2pd.ENVIRONMENT, "LIBP2P_TCP_REUSEPORT": "true"}
    with patch.object(p2pd, "ENVIRONMENT", as_libp2p_does) if way == "reuse" else nullcontext():
        asyncio.run(call(Path(folder), host, address, Path(meeting)))
