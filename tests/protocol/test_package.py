import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

USED_IMPORTS = "import protocol, protocol.membership.dht, protocol.membership.dht_storage, protocol.transport.transport"
WHOLE_PACKAGE = "import hivemind"


@pytest.mark.parametrize(
    ("program", "is_complete"),
    [(USED_IMPORTS, False), (f"{WHOLE_PACKAGE}, {USED_IMPORTS.removeprefix('import ')}", True)],
)
def test_only_the_used_parts_of_hivemind_are_loaded(program: str, is_complete: bool) -> None:
    code = f"{program}; import sys; print('scipy' in sys.modules, hasattr(sys.modules['hivemind'], 'Optimizer'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [str(is_complete)] * 2


def test_other_parts_of_hivemind_can_still_be_imported() -> None:
    code = (
        f"{USED_IMPORTS}; from hivemind.averaging import DecentralizedAverager; print(DecentralizedAverager.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "DecentralizedAverager"


IDLE_CONNECTION = """
import asyncio
import protocol
import grpc

async def answer(request, context):
    return request

async def main():
    server = grpc.aio.server(options=[("grpc.max_connection_idle_ms", 50)])
    handler = grpc.method_handlers_generic_handler("a", {"b": grpc.unary_unary_rpc_method_handler(answer)})
    server.add_generic_rpc_handlers([handler])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    await channel.unary_unary("/a/b")(b"x")
    while channel.get_state() == grpc.ChannelConnectivity.READY:
        await asyncio.sleep(0.05)
    await server.stop(0)

asyncio.run(main())
"""


def test_connection_that_was_idle_ends_without_a_raw_line_in_the_terminal() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IDLE_CONNECTION], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == ""
