"""`murmur doctor`: can this machine take part, and if not, what to do."""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from pathlib import Path

import httpx2
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from node.config import EVERYWHERE_LISTEN
from node.doctor import machine
from node.doctor.findings import Finding, failed, judged_clock
from node.doctor.network import network
from node.harmless import harmless
from node.links import Invitation, accept
from node.model import shape_table
from node.places import joined_folder
from node.program import program_of
from node.status import short_count
from protocol.errors import MurmurError

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
DATE_SECONDS = 10.0


def doctor(run: str | None, folder: Path | None, listen: Sequence[str], insecure: bool, as_json: bool) -> int:
    """Prints the findings; 0 when none is a fail, else 1."""
    findings = examine(run, folder, listen, insecure)
    if as_json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in findings], indent=1) + "\n")
    else:
        Console(highlight=False).print(_table(findings))
    return 1 if any(finding.level == "fail" for finding in findings) else 0


def examine(run: str | None, folder: Path | None, listen: Sequence[str], insecure: bool) -> list[Finding]:
    findings = [Finding("version", "ok", f"murmur {version('murmuration')}, torch {torch.__version__}")]
    findings.append(machine.device())
    invitation: Invitation | None = None
    if run is not None:
        try:
            invitation = accept(run, insecure)
            program_of(invitation.manifest)
        except MurmurError as error:
            return [*findings, failed("run", error)]
        findings.append(_run(invitation))
    home = folder or (joined_folder(invitation.manifest) if invitation else None)
    if home is not None:
        findings.append(machine.key(home / "key"))
    if invitation is not None and home is not None:
        findings += machine.room(invitation.manifest, home)
    found = asyncio.run(network(invitation, listen or (EVERYWHERE_LISTEN,)))
    if not any(finding.check == "clock" for finding in found):
        found.append(_clock(invitation.source if invitation else None))
    return findings + found


def _run(invitation: Invitation) -> Finding:
    manifest = invitation.manifest
    signed = "signed" if invitation.organiser else "not signed"
    count = short_count(shape_table(manifest.model).numel)
    return Finding("run", "ok", f"{manifest.run.name}, {count} parameters, {manifest.method.recipe}, {signed}")


def _clock(source: str | None) -> Finding:
    """Where no peer tells the time, the web server that the manifest came from does."""
    if source is None:
        return judged_clock([], "")
    try:
        date = httpx2.head(source, timeout=DATE_SECONDS).headers["date"]
        return judged_clock([time.time() - parsedate_to_datetime(date).timestamp()], "the host")
    except (httpx2.HTTPError, KeyError, ValueError):
        return Finding("clock", "warn", "the host does not tell its time", "nothing, if you trust your clock")


def _table(findings: Sequence[Finding]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for name in ("check", "", "found", "what to do"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        level = Text(finding.level, style=COLOURS[finding.level])
        table.add_row(finding.check, level, Text(harmless(finding.found)), Text(harmless(finding.mend)))
    return table
