"""What a measurement means: ok, warn or fail, and for what is not ok the mend. PURE."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from node.model.memory_estimate import max_microbatch
from node.units import format_bytes
from protocol.errors import MurmurError
from protocol.manifest import Manifest
from protocol.membership.peer_table import CLOCK_TOLERANCE_SECONDS
from protocol.transport.nat import find_direct_host, is_public_address

Level = Literal["ok", "warn", "fail"]
CLOCK_WARN_SECONDS = 5.0
FORWARD_PORT_FIX = "nothing, where a public peer takes part; otherwise forward a port and name it with --listen"


@dataclass(frozen=True)
class Finding:
    check: str
    level: Level
    found: str
    mend: str = ""


def finding_of_error(check: str, error: MurmurError) -> Finding:
    """What it says after its semicolon is the mend."""
    text, _, mend = str(error).partition("; ")
    return Finding(check, "fail", text, mend)


def judge_free_space(check: str, free: float, needed: float, mend: str) -> Finding:
    text = f"{format_bytes(free)} free, up to {format_bytes(needed)} needed"
    return Finding(check, "ok" if free >= needed else "fail", text, "" if free >= needed else mend)


def judge_microbatch(manifest: Manifest, free: float, device: str) -> Finding:
    fits = max_microbatch(manifest, free, device)
    text = f"microbatches of {fits} sequences fit, the run's have {manifest.train.microbatch}"
    if fits >= manifest.train.microbatch:
        return Finding("model", "ok", text)
    mend = "this device is too small for the run" if fits == 0 else "nothing: it takes more passes for a batch"
    return Finding("model", "fail" if fits == 0 else "warn", text, mend)


def judge_clock(offsets: Sequence[float], against: str) -> Finding:
    """`offsets`: our clock's lead over those of others, in seconds."""
    if not offsets:
        return Finding("clock", "ok", "not compared; a peer or a link to a host would tell")
    offset = median(offsets)
    level: Level = (
        "ok" if abs(offset) < CLOCK_WARN_SECONDS else "warn" if abs(offset) < CLOCK_TOLERANCE_SECONDS else "fail"
    )
    mend = "" if level == "ok" else "let the system set its clock: timedatectl set-ntp true"
    return Finding("clock", level, f"{offset:+.0f} s against {against}", mend)


def judge_addresses(addresses: Sequence[str]) -> Finding:
    if any(is_public_address(address) for address in addresses):
        return Finding("ports", "ok", "a public address: others can reach this machine")
    return Finding("ports", "warn", "no public address: others come by the connections that you open", FORWARD_PORT_FIX)


def judge_peers(attempts: Sequence[tuple[str, float | str]]) -> Finding:
    """`dialled`: addresses, each with the seconds that it took or why it failed."""
    if not attempts:
        return Finding("peers", "warn", "the run names nobody to ask", "give `murmur join` a --peer")
    times = [result for _, result in attempts if isinstance(result, float)]
    if times:
        return Finding(
            "peers", "ok", f"{len(times)} of {len(attempts)} addresses answer, the first in {min(times):.1f} s"
        )
    mend = "see whether a firewall stops outgoing TCP, or ask the organiser for an address"
    return Finding("peers", "fail", f"none of {len(attempts)} addresses answers: {attempts[0][1]}", mend)


def judge_public_peers(reached: Collection[str]) -> Finding:
    """`reached`: addresses of the peers that answered."""
    public = sum(1 for address in reached if is_public_address(address))
    if public:
        return Finding("public peers", "ok", f"{public} of {len(reached)} peers that answer are on the public internet")
    return Finding(
        "public peers",
        "warn",
        "no public peer answers: how the internet sees this machine cannot be said",
        "nothing, if all who take part share a network; otherwise somebody has to open a port to the internet",
    )


def judge_nat(own: Collection[str], observed: Sequence[str]) -> Finding | None:
    """`own`: the addresses that we know of; `seen`: what peers saw our calls come from. None: nobody told."""
    hosts = {found[1] for address in observed if (found := find_direct_host([address]))}
    if not hosts:
        return None
    if hosts <= {found[1] for address in own if (found := find_direct_host([address]))}:
        return Finding("nat", "ok", f"none: peers see {', '.join(sorted(hosts))}, which is this machine's own")
    if len(hosts) > 1:
        text = f"peers see {len(hosts)} different addresses of this machine"
        return Finding("nat", "warn", text, "others come by the connections that you open; a VPN may be in the way")
    return Finding("nat", "warn", f"behind a translated address: peers see {hosts.pop()}", FORWARD_PORT_FIX)


def judge_dial_back(answers: Mapping[str, bool], port: int) -> Finding | None:
    """`answers`: by peer, whether it could open a connection to us. None: nobody tried."""
    if not answers:
        return None
    able = sum(answers.values())
    text = f"{able} of {len(answers)} peers could connect to port {port}"
    return Finding("ports", "ok", text) if able else Finding("ports", "warn", text, FORWARD_PORT_FIX)


def judge_bandwidth(fetched_bytes: int, seconds: float, state_bytes: int, max_seconds: float) -> Finding:
    """Bytes that came from a real peer; `state`: bytes that a newcomer has to fetch; `patience`: seconds for that."""
    if not fetched_bytes:
        mend = "see whether something on the way stops long transfers, or try again later"
        return Finding("bandwidth", "fail", f"not a byte of the state came within {seconds:.0f} s", mend)
    rate = fetched_bytes / max(seconds, 1e-9)
    text = f"{format_bytes(rate)}/s from a peer; the run's state takes {state_bytes / rate:.0f} s to fetch"
    if state_bytes / rate <= max_seconds:
        return Finding("bandwidth", "ok", text)
    return Finding("bandwidth", "warn", text, "the start takes long; a faster link, or a smaller run, would help")


def judge_versions(ours: str, theirs: Collection[str]) -> Finding | None:
    """None where nobody said theirs."""
    others = sorted({version for version in theirs if version})
    if not others:
        return None
    if ours in others:
        return Finding("peers' version", "ok", ", ".join(others))
    return Finding("peers' version", "warn", f"{', '.join(others)}, here {ours}", "install the version of the others")
