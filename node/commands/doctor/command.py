"""`murmur doctor`: run the checks and print the findings."""

import asyncio
import json
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch

from node.commands.capacity import estimate_peer, measure_flops, small_memory, smaller_mode
from node.commands.doctor.checks import (
    Check,
    check_device,
    check_key,
    check_memory_and_disk,
    finding_of_error,
    free_memory,
    judge_clock,
)
from node.commands.doctor.network import probe_network
from node.commands.join.http_download import fetch_server_time
from node.commands.join.invitation import Invitation, open_or_recall
from node.data.check import TextReport, check_text
from node.from_manifest import require_program
from node.model import shape_table
from node.monitoring.logs import sanitize
from node.monitoring.tables import table_console
from node.paths import join_dir
from node.trainer.devices.device import choose_device
from node.units import format_count
from protocol.errors import MurmurError
from protocol.manifest.run import Manifest
from protocol.transport.nat import listen_on_all_interfaces

COLOURS = {"ok": "\x1b[32m", "warn": "\x1b[33m", "fail": "\x1b[31m"}
NORMAL = "\x1b[0m"
LEVEL_WIDTH = 6
ARROW = "-> "
MAX_WIDTH = 100
HOST_TIME_SECONDS = 10.0


def doctor(run: str | None, folder: Path | None, listen: Sequence[str], insecure: bool, as_json: bool) -> int:
    """Print the findings; returns the exit code, 1 if any check failed."""
    findings = run_checks(run, folder, listen, insecure)
    if as_json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in findings], indent=1) + "\n")
    else:
        console = table_console()
        lines = format_findings(findings, min(MAX_WIDTH, console.width), console.is_terminal)
        sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 1 if any(finding.level == "fail" for finding in findings) else 0


def run_checks(run: str | None, folder: Path | None, listen: Sequence[str], insecure: bool) -> list[Check]:
    """Check the machine, and with a run also the run, its memory and disk needs and its peers."""
    findings = [Check("version", "ok", f"murmur {version('murmuration')}, torch {torch.__version__}")]
    findings.append(check_device())
    invitation: Invitation | None = None
    if run is not None:
        try:
            invitation = open_or_recall(run, folder, insecure)
            require_program(invitation.manifest, invitation.text)
        except MurmurError as error:
            return [*findings, finding_of_error("run", error)]
        findings.append(_run_finding(invitation))
    home = folder or (invitation.folder or join_dir(invitation.manifest) if invitation else None)
    if home is not None:
        findings.append(check_key(home / "key"))
    if invitation is not None and home is not None:
        small = small_memory(invitation.manifest, choose_device("auto").type)
        smaller = smaller_mode(small, free_memory())
        findings += check_memory_and_disk(invitation.manifest, home, smaller)
    if invitation is not None and home is not None and not invitation.manifest.model.is_custom:
        findings.append(_predict_speed(invitation.manifest))
    if invitation is not None and home is not None:
        findings += _check_text(invitation.manifest, invitation.base or home / "data")
    found = asyncio.run(probe_network(invitation, listen or listen_on_all_interfaces()))
    if not any(finding.check == "clock" for finding in found):
        found.append(_compare_host_clock(invitation.source if invitation else None))
    return findings + found


def _run_finding(invitation: Invitation) -> Check:
    manifest = invitation.manifest
    signed = "signed" if invitation.organiser else "not signed"
    count = format_count(shape_table(manifest.model).numel)
    return Check("run", "ok", f"{manifest.run.name}, {count} parameters, {manifest.method.recipe}, {signed}")


def _predict_speed(manifest: Manifest) -> Check:
    """Predict the speed of a trainer from that of matrix products on this machine."""
    device = choose_device("auto")
    speed = estimate_peer(manifest, device.type, free_memory(), measure_flops(device)).tokens_per_second
    return Check("speed", "ok", f"at most {format_count(int(speed))} tokens a second")


def _check_text(manifest: Manifest, base: Path) -> list[Check]:
    """Open the text of the run and read the beginning of each source."""
    if manifest.data.source == "own":
        return [Check("data", "ok", "each training loop brings its own")]
    try:
        return [_text_finding(report) for report in check_text(manifest, base)]
    except MurmurError as error:
        return [finding_of_error("data", error)]


def _text_finding(report: TextReport) -> Check:
    if report.unchecked or report.skipped:
        found = "; ".join((report.describe(), *report.skipped[:1]))
        return Check("data", "warn", found, "repair the row, if it should count" if report.skipped else "")
    return Check("data", "ok", report.describe())


def _compare_host_clock(source: str | None) -> Check:
    """Compare the clock with the web server of the manifest, for a run whose peers do not report the time."""
    if source is None or not source.startswith("http"):
        return judge_clock([], "")
    served = fetch_server_time(source, HOST_TIME_SECONDS)
    if served is None:
        return Check("clock", "warn", "the host does not send its time", "nothing, if your clock is right")
    return judge_clock([time.time() - served], "the host")


def format_findings(findings: Sequence[Check], width: int, has_colours: bool = False) -> Iterator[str]:
    """Yield the lines for people, at most `width` cells wide: a remedy has lines of its own, below its finding."""
    names = max(len(finding.check) for finding in findings) + 2
    indent = " " * (names + LEVEL_WIDTH)
    for finding in findings:
        level = f"{finding.level:<{LEVEL_WIDTH}}"
        first, *rest = textwrap.wrap(sanitize(finding.found), width - len(indent)) or [""]
        coloured = f"{COLOURS[finding.level]}{level}{NORMAL}" if has_colours else level
        yield f"{finding.check:<{names}}{coloured}{first}".rstrip()
        for line in rest:
            yield f"{indent}{line}"
        for line in textwrap.wrap(sanitize(finding.mend), width - len(indent) - len(ARROW)):
            yield f"{indent}{ARROW}{line}"
