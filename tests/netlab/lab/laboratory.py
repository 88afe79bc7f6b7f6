"""Real limited links on one machine: network namespaces around a bridge, which stands for the internet.

A node's link has a rate for each direction (token buckets of the kernel), a delay for what arrives, and a loss. Cuts
are silent, as on the internet: packets vanish, nobody is told. A home router hides what is behind it as masquerading
routers do. The bridge has a namespace of its own and no way out: nothing of the machine's network is touched.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.netlab.lab import delay, namespaces
from tests.netlab.lab.namespaces import run, run_inside

NETWORK = "45.0.0"  # looks public to those inside, who decide by an address what may reach it
HOME = "192.168.1"  # behind every router the same
MAX_NODES = 200
QUEUE_SECONDS = 0.1  # of traffic wait before a link
BURST_SECONDS, LEAST_BURST = 0.004, 16_384

RULES = """
table bridge lab {
    chain blocks { type filter hook forward priority 0; }
    chain losses { type filter hook forward priority 1; }
    chain others { type filter hook forward priority 2; ether type ip6 drop; }
}
"""
ROUTER = """
table ip home {
    chain hide { type nat hook postrouting priority 100; oifname "eth0" masquerade; }
    chain enter { type filter hook input priority 0; iifname "eth0" ct state new drop; }
    chain through { type filter hook forward priority 0; iifname "eth0" ct state new drop; }
}
"""


@dataclass(frozen=True)
class Link:
    """Between a node and the internet. Rates in Mbit/s; a round trip takes the delays of both ends together."""

    up: float = 1000.0
    down: float = 1000.0
    delay: float = 0.0  # seconds, of what arrives
    jitter: float = 0.0  # seconds, at most, on top of the delay
    loss: float = 0.0  # share of the packets that it sends


@dataclass
class Node:
    """A machine: `address` is its own, `public` that under which the internet sees it."""

    name: str
    namespace: str
    address: str
    public: str
    router: "Node | None" = None
    next_home_address: int = 0  # behind it, if it is a router
    holder: subprocess.Popen[str] | None = field(default=None, repr=False)  # the process that delays


class Laboratory:
    """Use it with `with`. What a killed owner left is removed by the next one."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._links: dict[str, Link] = {}  # by address
        self._processes: list[subprocess.Popen[str]] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        namespaces.remove_orphans()
        with self._stack:  # whatever fails here, the namespace goes
            self._exchange = self._namespace("exchange")
            run(f"ip -n {self._exchange} link add bridge type bridge")
            run(f"ip -n {self._exchange} link set bridge up")
            run_inside(self._exchange, "nft -f -", RULES)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
        self._stack.close()
        for process in self._processes:
            process.communicate()

    def node(self, link: Link | None = None, behind: Node | None = None) -> Node:
        """A machine on the internet, or one behind a home router, whose link it shares."""
        if behind is None:
            return self._make_internet_node(link or Link())
        assert link is None, "the link is the router's"
        behind.next_home_address += 1
        namespace = self._namespace(f"{behind.name}-{behind.next_home_address}")
        port = f"home{behind.next_home_address}"
        self._connect(namespace, f"{HOME}.{1 + behind.next_home_address}", behind.namespace, port, "home")
        node = Node(port, namespace, f"{HOME}.{1 + behind.next_home_address}", behind.public, behind)
        self._route_out(node)
        return node

    def router(self, link: Link | None = None) -> Node:
        """A home router: who is behind it can call out, and nobody can call in."""
        node = self._make_internet_node(link or Link())
        run(f"ip -n {node.namespace} link add home type bridge")
        run(f"ip -n {node.namespace} addr add {HOME}.1/24 dev home")
        run(f"ip -n {node.namespace} link set home up")
        run_inside(node.namespace, "sysctl -q -w net.ipv4.ip_forward=1")
        run_inside(node.namespace, "nft -f -", ROUTER)
        return node

    def ordinary_node(self, link: Link) -> Node:
        """A machine on the internet that knows of no better congestion control than most do, whatever this one has."""
        node = self.node(link)
        run(f"ip -n {node.namespace} route replace {NETWORK}.0/24 dev eth0 src {node.address} congctl cubic")
        return node

    def set_link(self, node: Node, link: Link) -> None:
        """Give the node another link, from now on."""
        assert node.router is None, "the link is the router's"
        self._links[node.address] = link
        self._limit(node.namespace, "eth0", link.up)
        self._limit(self._exchange, node.name, link.down)
        self._delay(node, link)
        if link.loss:  # or dozens of packets would be lost as one
            run(f"ip -n {node.namespace} link set eth0 gso_max_segs 1")
        self._block_all()

    def block(self, source: Node, target: Node) -> None:
        """Nothing gets from `source` to `target`; the other way stays open."""
        self._drop([(source, target)])

    def partition(self, *groups: Sequence[Node]) -> None:
        """Between different groups nothing passes."""
        pairs = permutations(groups, 2)
        self._drop([(one, other) for left, right in pairs for one in left for other in right])

    def cut(self, node: Node) -> None:
        """Nothing passes between the node and any other; neither is told."""
        self.partition([node], [other for other in self.nodes if other.public != node.public])

    def heal(self) -> None:
        """All blocks, partitions and cuts are over."""
        run_inside(self._exchange, "nft flush chain bridge lab blocks")

    def unplug(self, node: Node) -> None:
        """The node's own interface goes down: its system knows."""
        run(f"ip -n {node.namespace} link set eth0 down")

    def plug(self, node: Node) -> None:
        run(f"ip -n {node.namespace} link set eth0 up")
        self._route_out(node)

    def interface_bytes(self, node: Node) -> tuple[int, int]:
        """Bytes that its interface has sent and received, packets' heads among them."""
        counts = Path("/sys/class/net/eth0/statistics")
        read = run_inside(node.namespace, f"cat {counts / 'tx_bytes'} {counts / 'rx_bytes'}").split()
        return int(read[0]), int(read[1])

    @contextlib.contextmanager
    def inside(self, node: Node) -> Iterator[None]:
        """This thread's new sockets and processes are the node's."""
        with namespaces.inside(node.namespace):
            yield

    def start(self, node: Node, command: Sequence[str]) -> subprocess.Popen[str]:
        """A process inside the node, its output in pipes; killed at the end of the laboratory."""
        with self.inside(node):
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self._processes.append(process)
        return process

    def _namespace(self, name: str) -> str:
        namespace = namespaces.create(name)
        self._stack.callback(namespaces.remove, namespace)
        return namespace

    def _make_internet_node(self, link: Link) -> Node:
        number = len(self.nodes) + 1
        assert number <= MAX_NODES
        name, address = f"node{number}", f"{NETWORK}.{number}"
        node = Node(name, self._namespace(name), address, address)
        self.nodes.append(node)
        self._connect(node.namespace, address, self._exchange, name, "bridge")
        self._route_out(node)
        self.set_link(node, link)
        return node

    def _connect(self, namespace: str, address: str, other: str, port: str, bridge: str) -> None:
        """A cable from the namespace's eth0 to a port of a bridge in another namespace."""
        run(f"ip link add eth0 netns {namespace} type veth peer name {port} netns {other}")
        run(f"ip -n {other} link set {port} master {bridge} up")
        run(f"ip -n {namespace} addr add {address}/24 dev eth0")
        run(f"ip -n {namespace} link set lo up")
        run(f"ip -n {namespace} link set eth0 up")

    def _route_out(self, node: Node) -> None:
        gateway = f"via {HOME}.1" if node.router else "dev eth0"
        run(f"ip -n {node.namespace} route replace default {gateway}")

    def _limit(self, namespace: str, device: str, rate: float) -> None:
        burst = max(LEAST_BURST, int(rate * 1e6 / 8 * BURST_SECONDS))
        bucket = f"tbf rate {rate}mbit burst {burst} latency {QUEUE_SECONDS * 1000:.0f}ms"
        run(f"tc -n {namespace} qdisc replace dev {device} root {bucket}")

    def _delay(self, node: Node, link: Link) -> None:
        if node.holder is not None:
            run_inside(node.namespace, "iptables -t raw -F PREROUTING")
            node.holder.kill()
            node.holder = None
        if link.delay or link.jitter:
            command = [sys.executable, "-S", str(delay.__file__), str(link.delay), str(link.jitter)]
            node.holder = self.start(node, command)
            assert node.holder.stdout and node.holder.stderr
            assert node.holder.stdout.readline().strip() == delay.READY, node.holder.stderr.read()

    def _block_all(self) -> None:
        rule = "add rule bridge lab losses ip saddr {} meta random < {} drop"
        lossy = {address: link.loss for address, link in self._links.items() if link.loss}
        rules = [rule.format(address, int(loss * 2**32)) for address, loss in lossy.items()]
        run_inside(self._exchange, "nft -f -", "\n".join(["flush chain bridge lab losses", *rules]))

    def _drop(self, pairs: Sequence[tuple[Node, Node]]) -> None:
        """In one transaction: all of it happens at the same moment."""
        rule = "add rule bridge lab blocks ip saddr {} ip daddr {} drop"
        run_inside(self._exchange, "nft -f -", "\n".join(rule.format(one.public, two.public) for one, two in pairs))


def read_line(process: subprocess.Popen[str]) -> str:
    """The next one that a started process prints; AssertionError with its last words where it has ended."""
    assert process.stdout and process.stderr
    line = process.stdout.readline().strip()
    assert line, process.stderr.read()
    return line
