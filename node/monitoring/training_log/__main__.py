"""`python -m node.monitoring.training_log CONFIGURATION`: feed a node's metrics to loggers of other packages.

The process ends soon after its standard input is closed, as it is when the node ends in any way. It reports on standard
output, a line each; whatever packages print goes nowhere.
"""

import json
import os
import select
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from node.monitoring.training_log.file import Follower
from node.monitoring.training_log.loggers import KINDS, LoggedRun, LoggerThread, finite_numbers

POLL_SECONDS = 0.5


def main(configuration: dict[str, Any]) -> None:
    """Follow the file until standard input ends; the process ends here."""
    report = _take_standard_output()
    run = LoggedRun(
        Path(configuration["folder"]),
        configuration["run"],
        configuration["run_id"],
        configuration["peer"],
        configuration["name"],
    )
    threads = [
        LoggerThread(name, partial(KINDS[name], run), lambda line: print(line, file=report, flush=True))
        for name in configuration["loggers"]
    ]
    follower = Follower(run.folder, configuration["offset"])
    is_ended = False
    while not is_ended:
        is_ended = bool(select.select([sys.stdin], [], [], POLL_SECONDS)[0])
        _feed(follower, threads)
    deadline = time.monotonic() + configuration["finish_seconds"]
    has_ended = [thread.finish(deadline) for thread in threads]
    report.close()
    if not all(has_ended):
        os._exit(0)  # a thread that hangs would keep the process


def _take_standard_output() -> TextIO:
    """Return standard output for reports, and lead what packages print to nowhere."""
    report = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    return report


def _feed(follower: Follower, threads: list[LoggerThread]) -> None:
    for line in follower.read_lines():
        try:
            values = finite_numbers(json.loads(line))
        except ValueError:
            continue  # half of a line, after the disk was full
        if values is not None:
            for thread in threads:
                thread.offer(values)
    for thread in threads:
        thread.check(time.monotonic())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
