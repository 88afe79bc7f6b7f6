"""Judge measurements: ok, warn or fail, and how to fix the latter two. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from node.model.memory_estimate import max_microbatch, run_microbatch
from node.units import format_bytes
from protocol.errors import MurmurError
from protocol.manifest.run import Manifest
from protocol.membership.peer_table import CLOCK_TOLERANCE_SECONDS
from protocol.transport.nat import find_direct_host, is_public_address

Level = Literal["ok", "warn", "fail"]
CLOCK_WARN_SECONDS = 5.0
FORWARD_PORT_FIX = "nothing, if a public peer takes part; otherwise forward a port and name it with --listen"


@dataclass(frozen=True)
class Finding:
    """The result of one check; `mend` says how to fix it."""

    check: str
    level: Level
    found: str
    mend: str = ""


def finding_of_error(check: str, error: MurmurError) -> Finding:
    """Return a failure; the part of the error after the semicolon says how to fix it."""
    text, _, fix = str(error).partition("; ")
    return Finding(check, "fail", text, fix)


def judge_free_space(check: str, free: float, needed: float, fix: str) -> Finding:
    """Compare free with needed bytes."""
    text = f"{format_bytes(free)} free, up to {format_bytes(needed)} needed"
    return Finding(check, "ok" if free >= needed else "fail", text, "" if free >= needed else fix)


def judge_microbatch(manifest: Manifest, free: float, device: str, cards: int = 1) -> Finding:
    """Compare the largest microbatch that fits into `free` bytes of a device with the run's.

    If it does not fit, `cards` such devices together may help.
    """
    fits = max_microbatch(manifest, free, device)
    wanted, least = run_microbatch(manifest)
    text = f"microbatches of {fits} sequences fit, the run's have {wanted}"
    if fits >= wanted:
        return Finding("model", "ok", text)
    together = fits if manifest.pipeline.is_cut else max_microbatch(manifest, free, device, ranks=cards)
    if together >= least and together > fits:
        return Finding("model", "warn", text, f"use --device all: {cards} cards hold a part of the model each")
    more = max_microbatch(manifest, free, device, "full")
    if fits < least:
        fix = "start with --recompute full" if more >= least else "this device is too small for the run"
    else:
        fix = f"nothing: a batch takes more passes; with --recompute full {min(more, wanted)} fit"
    return Finding("model", "fail" if fits < least else "warn", text, fix)


def judge_clock(offsets: Sequence[float], against: str) -> Finding:
    """Judge the median of `offsets`, our clock's lead over other clocks in seconds."""
    if not offsets:
        return Finding("clock", "ok", "not compared; this needs a run with peers or a host")
    offset = median(offsets)
    level: Level = (
        "ok" if abs(offset) < CLOCK_WARN_SECONDS else "warn" if abs(offset) < CLOCK_TOLERANCE_SECONDS else "fail"
    )
    fix = "" if level == "ok" else "let the system set its clock: timedatectl set-ntp true"
    return Finding("clock", level, f"{offset:+z.0f} s compared with {against}", fix)


def judge_addresses(addresses: Sequence[str]) -> Finding:
    """Judge whether one of this machine's addresses is public."""
    if any(is_public_address(address) for address in addresses):
        return Finding("ports", "ok", "a public address: other peers can reach this machine")
    return Finding("ports", "warn", "no public address: peers use the connections that you open", FORWARD_PORT_FIX)


def judge_peers(attempts: Sequence[tuple[str, float | str]]) -> Finding:
    """Judge attempts to connect: addresses, each with the seconds that it took or the reason why it failed."""
    if not attempts:
        return Finding("peers", "warn", "the run names no peer to ask", "give `murmur join` a --peer")
    times = [result for _, result in attempts if isinstance(result, float)]
    if times:
        return Finding(
            "peers", "ok", f"{len(times)} of {len(attempts)} addresses answer, the first in {min(times):.1f} s"
        )
    fix = "check whether a firewall blocks outgoing TCP, or ask the organiser for an address"
    return Finding("peers", "fail", f"none of {len(attempts)} addresses answers: {attempts[0][1]}", fix)


def judge_public_peers(reached: Collection[str]) -> Finding:
    """Judge whether any of the peers that answered (their addresses) is on the public internet."""
    public = sum(1 for address in reached if is_public_address(address))
    if public:
        return Finding("public peers", "ok", f"{public} of {len(reached)} peers that answer are on the public internet")
    return Finding(
        "public peers",
        "warn",
        "no public peer answers: cannot tell how the internet sees this machine",
        "nothing, if all peers share a network; otherwise one peer must open a port to the internet",
    )


def judge_nat(own: Collection[str], observed: Sequence[str]) -> Finding | None:
    """Compare this machine's own addresses with those that peers see; `None` if no peer reported one."""
    hosts = {found[1] for address in observed if (found := find_direct_host([address]))}
    if not hosts:
        return None
    if hosts <= {found[1] for address in own if (found := find_direct_host([address]))}:
        return Finding("nat", "ok", f"none: peers see {', '.join(sorted(hosts))}, which is this machine's own")
    if len(hosts) > 1:
        text = f"peers see {len(hosts)} different addresses of this machine"
        return Finding("nat", "warn", text, "peers use the connections that you open; a VPN may be the cause")
    return Finding("nat", "warn", f"behind a NAT: peers see {hosts.pop()}", FORWARD_PORT_FIX)


def judge_dial_back(answers: Mapping[str, bool], port: int) -> Finding | None:
    """Judge whether peers could connect to us; `answers` has an entry per peer, and none of them gives `None`."""
    if not answers:
        return None
    able = sum(answers.values())
    text = f"{able} of {len(answers)} peers could connect to port {port}"
    return Finding("ports", "ok", text) if able else Finding("ports", "warn", text, FORWARD_PORT_FIX)


def judge_bandwidth(fetched_bytes: int, seconds: float, state_bytes: int, max_seconds: float) -> Finding:
    """Judge the download rate from a peer.

    A new peer has to fetch `state_bytes`; it starts slowly if that takes more than `max_seconds`.
    """
    if not fetched_bytes:
        fix = "check whether the network blocks long transfers, or try again later"
        return Finding("bandwidth", "fail", f"no byte of the state arrived within {seconds:.0f} s", fix)
    rate = fetched_bytes / max(seconds, 1e-9)
    text = f"{format_bytes(rate)}/s from a peer; the run's state takes {state_bytes / rate:.0f} s to fetch"
    if state_bytes / rate <= max_seconds:
        return Finding("bandwidth", "ok", text)
    return Finding("bandwidth", "warn", text, "the start is slow; use a faster link or a smaller run")


def judge_versions(ours: str, theirs: Collection[str]) -> Finding | None:
    """Compare this version with those of the peers; `None` if no peer reports one."""
    others = sorted({version for version in theirs if version})
    if not others:
        return None
    if ours in others:
        return Finding("peers' version", "ok", ", ".join(others))
    return Finding("peers' version", "warn", f"{', '.join(others)}, here {ours}", "install the peers' version")
