"""A machine without IPv4: a node listens there by default, announces its IPv6 address, and is reached at it."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.netlab, pytest.mark.timeout(240)]

ADDRESS = "fd00:1::5"
# The loopback interface carries the address, and the default route leads to it: `connect` to any host finds a source.
NETWORK = f"""
ip link set lo up
ip -6 addr add {ADDRESS}/128 dev lo
ip -6 route add default dev lo
exec {sys.executable} -c "$0" "$1"
"""
PROGRAM = f"""
import asyncio, pathlib, socket, sys
from node.commands.doctor.network import listening_tcp_port
from node.run_dir import RunDir, reuse_last_port
from protocol.transport.nat import find_own_ip, listen_on_all_interfaces
from protocol.transport.transport import Transport

async def start(name, **options):
    folder = pathlib.Path(sys.argv[1]) / name
    listen = await reuse_last_port(RunDir(folder), listen_on_all_interfaces())
    return await Transport.start(folder / "key", folder, [], listen=listen, direct=0, **options)

async def main():
    assert find_own_ip() == "{ADDRESS}", find_own_ip()
    server, client = await start("server"), await start("client")
    try:
        addresses = await server.addresses()
        ours = [address for address in addresses if address.startswith("/ip6/{ADDRESS}/tcp/")]
        assert len(ours) == 1, addresses
        assert len({{address.split("/")[4] for address in addresses}}) == 1, "one port for both families"
        assert await client.connect(ours[0], 20) == server.peer_id
        for host in ("{ADDRESS}", "127.0.0.1"):
            reader, writer = await asyncio.open_connection(host, server.direct_port)
            writer.close()
    finally:
        await client.stop()
        await server.stop()

asyncio.run(main())
print("reached")
"""


def test_machine_without_ipv4_is_reached_at_its_ipv6_address(permitted: None, tmp_path: Path) -> None:
    """Control: a node that listens on IPv4 alone announces no address of this machine."""
    for program in (PROGRAM, PROGRAM.replace("listen_on_all_interfaces())", "('/ip4/0.0.0.0/tcp/0',))")):
        command = ["unshare", "--net", "sh", "-c", NETWORK, program, str(tmp_path)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=Path(__file__).parents[2])
        assert (ended.stdout == "reached\n") == (program is PROGRAM), ended.stderr
