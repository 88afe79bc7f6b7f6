"""A peer that calls another one at a given moment, run inside a node: `caller.py FOLDER HOST WAY`.

WAY: `ours`, or `reuse` for calls from the port on which it listens, as libp2p does it by itself.
"""

import asyncio
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

from protocol.errors import UnreachableError
from protocol.transport import p2pd
from protocol.transport.transport import Transport

DIAL_TIMEOUT_SECONDS = 10.0


async def dial_at(folder: Path, host: str) -> None:
    """Prints its address; reads whom to call and when, by the machine's monotonic clock; prints what became of it."""
    folder.mkdir()
    transport = await Transport.start(folder / "key", folder, [], listen=[f"/ip4/{host}/tcp/0"])
    print((await transport.addresses())[0], flush=True)
    address, moment = (await asyncio.to_thread(sys.stdin.readline)).split()
    due, trouble = float(moment), ""
    await asyncio.sleep(due - time.monotonic())
    try:
        await transport.connect(address, DIAL_TIMEOUT_SECONDS)
    except UnreachableError as error:
        trouble = str(error)
    print(json.dumps({"seconds": time.monotonic() - due, "trouble": trouble}), flush=True)
    await asyncio.Event().wait()  # the other end may still be at it


if __name__ == "__main__":
    as_libp2p_does = p2pd.ENVIRONMENT | {"LIBP2P_TCP_REUSEPORT": "true"}
    with patch.object(p2pd, "ENVIRONMENT", as_libp2p_does) if sys.argv[3] == "reuse" else nullcontext():
        asyncio.run(dial_at(Path(sys.argv[1]), sys.argv[2]))
