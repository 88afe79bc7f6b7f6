"""Results of `murmur eval` in a host's folder: those that people add, and those that the host makes by itself.

The host evaluates in a process of its own with a low priority and a deadline, so neither the page nor a trainer waits.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from node.commands.eval.results import RESULTS_FILE, read_results
from node.dashboard.event_log import EventLog
from node.dashboard.events import MAX_RESULTS, ModelEvaluated
from node.paths import find_newest_model
from node.processes.workers import run_module
from protocol.errors import MurmurError, UsageError

logger = logging.getLogger(__name__)

POLL_SECONDS = 5.0
DEADLINE_SECONDS = 1800.0  # for one evaluation
MODULE = "node.commands.eval"


@dataclass(frozen=True)
class EvaluationPlan:
    """The plan of the host's evaluations: every few rounds, on the held-out text or on tasks of lm-eval."""

    every: int
    tasks: tuple[str, ...] = ()


def plan_of(every: int | None, tasks: Sequence[str]) -> EvaluationPlan | None:
    """Return the plan of a command line. Raises UsageError for tasks without rounds."""
    if tasks and every is None:
        raise UsageError("--tasks needs --eval-every; after the run, `murmur eval` evaluates the host's folder")
    return None if every is None else EvaluationPlan(every, tuple(tasks))


def is_evaluation_due(newest_round: int | None, evaluated_round: int | None, every: int, is_over: bool) -> bool:
    """Return whether to evaluate now. `None` means that there is no model, or no result yet."""
    if newest_round is None or newest_round == evaluated_round:
        return False
    return is_over or newest_round - (evaluated_round or 0) >= every


class EvaluationKeeper:
    """Records the results in a host's folder as events, and evaluates the newest model when the plan wants it."""

    def __init__(self, folder: Path, event_log: EventLog, plan: EvaluationPlan | None = None) -> None:
        self._folder = folder
        self._event_log = event_log
        self._plan = plan
        self._read_size = -1  # of the file, when it was read last
        self._tried_round: int | None = None
        self._failure = ""

    async def run(self) -> None:
        """Look for results, and evaluate by the plan, until cancelled."""
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._record_forever())
            if self._plan is not None:
                loops.create_task(self._evaluate_forever(self._plan))

    async def _record_forever(self) -> None:
        while True:
            await self.record_new_results()
            await asyncio.sleep(POLL_SECONDS)

    async def _evaluate_forever(self, plan: EvaluationPlan) -> None:
        while True:
            await self.evaluate_if_due(plan)
            await asyncio.sleep(POLL_SECONDS)

    async def record_new_results(self) -> None:
        """Record the results that are younger than those that are known."""
        path = self._folder / RESULTS_FILE
        size = path.stat().st_size if path.exists() else 0
        if size == self._read_size:
            return
        self._read_size = size
        newest = max((one.time for one in self._event_log.state.evaluations), default=0.0)
        found = [one for one in await asyncio.to_thread(read_results, self._folder) if one.time > newest]
        for start in range(0, len(found), MAX_RESULTS):
            self._event_log.record(ModelEvaluated(at=time.time(), results=tuple(found[start : start + MAX_RESULTS])))

    async def evaluate_if_due(self, plan: EvaluationPlan) -> None:
        """Evaluate the newest model if it is due; a failure is logged once for each reason."""
        model, state = find_newest_model([self._folder]), self._event_log.state
        newest, rounds = model[0] if model else None, [one.round for one in state.evaluations]
        tried = max((number for number in (*rounds, self._tried_round) if number is not None), default=None)
        if not is_evaluation_due(newest, tried, plan.every, state.is_over):
            return
        self._tried_round = newest
        try:
            await evaluate_beside(self._folder, plan.tasks)
            self._failure = ""
        except MurmurError as error:
            if str(error) != self._failure:
                logger.warning("the model was not evaluated: %s", error)
            self._failure = str(error)


async def evaluate_beside(folder: Path, tasks: Sequence[str], seconds: float = DEADLINE_SECONDS) -> None:
    """Evaluate the newest model in a folder in a process of its own, which notes the results. Raises MurmurError."""
    try:
        child = await run_module(MODULE, [str(folder), *tasks], seconds)
    except TimeoutError as error:  # before OSError, of which it is one
        raise MurmurError(f"it took longer than {seconds:g} s") from error
    except OSError as error:
        raise MurmurError(f"the process cannot be started: {error.strerror}") from error
    if child.exit_code != 0:
        raise MurmurError(child.last_error or f"the process ended with exit code {child.exit_code}")
