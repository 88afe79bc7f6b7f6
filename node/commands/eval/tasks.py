"""Run tasks of the package lm-eval (the `eval` extra) on our own model."""

from collections.abc import Sequence
from typing import NamedTuple

from node.commands.eval.scoring import Scorer
from node.model.opened_model import OpenedModel
from protocol.errors import DataError


class Score(NamedTuple):
    """A metric of a model on a task."""

    task: str
    metric: str
    value: float
    standard_error: float | None
    samples: int | None


def evaluate_tasks(opened: OpenedModel, scorer: Scorer, tasks: Sequence[str], limit: int | None) -> list[Score]:
    """Return the scores of a model on tasks: names of lm-eval, or YAML files and folders of them.

    Args:
        limit: the most examples of each task; `None` means all.

    Raises:
        DataError: the package is missing, or the data of a task cannot be read.
        UsageError: there is no such task.
    """
    try:
        from node.commands.eval.harness import run_harness
    except ImportError as error:
        raise DataError("--tasks needs the package lm-eval; install it: pip install 'murmuration[eval]'") from error
    return run_harness(opened, scorer, tasks, limit)
