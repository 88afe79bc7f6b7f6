"""The results of evaluations: a file of lines in the folder of a run, to which each evaluation adds.

    evaluations.jsonl   {"time", "round", "tokens", "task", "metric", "value", "standard_error", "samples"}

A reader takes the lines that it understands, because the newest one may be half written.
"""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from node.run_dir import append_bounded
from protocol.errors import StorageError

RESULTS_FILE: Final = "evaluations.jsonl"
MAX_RESULTS_BYTES: Final = 2 << 20  # of the file; some ten thousand results, before which it is set aside
MAX_NAME: Final = 128


class Result(BaseModel):
    """A metric of a model on a task; `None` means that nobody knows it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    time: float = Field(ge=0, description="seconds since the epoch")
    round: int | None = Field(default=None, ge=0, description="of the run; None for an exported model")
    tokens: int | None = Field(default=None, ge=0, description="that the run had counted then")
    task: str = Field(max_length=MAX_NAME)
    metric: str = Field(max_length=MAX_NAME)
    value: float
    standard_error: float | None = None
    samples: int | None = Field(default=None, ge=0, description="windows of text, or examples of the task")


def finite_or_none(value: float | None) -> float | None:
    """Return a number, or `None` for one that is not finite, which JSON cannot hold."""
    return value if value is not None and math.isfinite(value) else None


def append_results(folder: Path, results: Iterable[Result]) -> None:
    """Add results to the file of a run's folder. Raises StorageError."""
    path = folder / RESULTS_FILE
    try:
        append_bounded(path, "".join(result.model_dump_json() + "\n" for result in results), MAX_RESULTS_BYTES)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}; free some space") from error


def read_results(folder: Path) -> tuple[Result, ...]:
    """Return the results in a folder, oldest first; none without a file."""
    try:
        with (folder / RESULTS_FILE).open("rb") as file:
            lines = file.read(2 * MAX_RESULTS_BYTES).splitlines()
    except OSError:
        return ()
    return tuple(result for line in lines if (result := _parse(line)) is not None)


def newest_of_each(results: Sequence[Result]) -> list[Result]:
    """Return the newest result of each metric of each task, in the order of their first appearance."""
    return list({(result.task, result.metric): result for result in results}.values())


def result_rows(results: Iterable[Result]) -> list[tuple[str, ...]]:
    """Return the cells of a table: task, metric, value, standard error, samples, round, tokens."""
    return [
        (
            result.task,
            result.metric,
            f"{result.value:.4f}",
            "" if result.standard_error is None else f"{result.standard_error:.4f}",
            _count(result.samples),
            _count(result.round),
            _count(result.tokens),
        )
        for result in results
    ]


RESULT_HEADINGS: Final = ("task", "metric", "value", "± error", "samples", "round", "tokens")


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _parse(line: bytes) -> Result | None:
    try:
        return Result.model_validate(json.loads(line))
    except (ValueError, ValidationError, RecursionError):
        return None
