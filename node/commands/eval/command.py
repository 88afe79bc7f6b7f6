"""`murmur eval`: open a model, evaluate it, and note the results in the folder of its run."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from node.commands.console import named_device, open_model
from node.commands.eval.results import (
    RESULT_HEADINGS,
    Result,
    append_results,
    finite_or_none,
    newest_of_each,
    read_results,
    result_rows,
)
from node.commands.eval.scoring import Score, Scorer, evaluate_validation
from node.commands.join.consent import require_data_consent
from node.commands.join.invitation import DATA, text_base
from node.commands.up.report import update_report
from node.daemon.checkpoints.checkpoint_folders import is_checkpoint
from node.model.opened_model import OpenedModel
from node.monitoring.logs import sanitize
from node.monitoring.tables import table_console
from node.paths import join_dir
from node.run_file import load_run_file
from protocol.errors import DataError, UsageError
from protocol.manifest.run import Manifest

DEFAULT_BATCH = 8

TASK_SEPARATOR = ","


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


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """The command line of `murmur eval`."""

    source: str
    tasks: Sequence[str] = ()
    data: Path | None = None
    limit: int | None = None
    batch: int | None = None
    device: str = "auto"
    peers: Sequence[str] = ()
    insecure: bool = False
    allow_data: bool = False


def evaluate(options: EvalOptions) -> list[Result]:
    """Evaluate a model, and add the results to those of its folder if it is of a run. Raises MurmurError."""
    device = named_device(options.device)
    tasks = [name.strip() for task in options.tasks for name in task.split(TASK_SEPARATOR) if name.strip()]
    opened = open_model(options.source, options.peers, options.insecure)
    run = opened.run
    batch = options.batch or (min(run.manifest.train.microbatch, DEFAULT_BATCH) if run else DEFAULT_BATCH)
    text = None if tasks else _find_text(opened, options)
    scorer = Scorer(opened.build(device), batch)
    if text is None:
        scores = evaluate_tasks(opened, scorer, tasks, options.limit)
    else:
        scores = evaluate_validation(opened, scorer, *text, options.limit)
    results = [_result(score, opened) for score in scores]
    if run is not None and run.node is not None:
        folder = run.node if is_checkpoint(Path(options.source)) else Path(options.source)
        append_results(folder, results)
        update_report(folder, newest_of_each(read_results(folder)))
    return results


def _find_text(opened: OpenedModel, options: EvalOptions) -> tuple[Manifest, Path]:
    """Return the manifest that names the held-out text, and the folder at which its paths start."""
    run = opened.run
    if options.data is not None:
        manifest, base = load_run_file(options.data).manifest, options.data.parent.resolve()
    elif run is None:
        raise UsageError(f"{options.source} has no text of its own; name a manifest with --data, or --tasks")
    elif run.node is not None:
        return run.manifest, text_base(run.node)
    elif Path(options.source).is_file():
        return run.manifest, Path(options.source).parent.resolve()
    else:
        base = join_dir(run.manifest) / DATA
        require_data_consent(run.manifest.data, base, options.allow_data)
        return run.manifest, base
    has_shards = any(source.source == "tokens" for source in manifest.data.mixture)
    if not has_shards:  # whose ids must be those of the model already
        file = str(opened.tokenizer_file.resolve()) if opened.tokenizer_file else ""
        manifest = manifest.model_copy(update={"data": manifest.data.model_copy(update={"tokenizer": file})})
    return manifest, base


def _result(score: Score, opened: OpenedModel) -> Result:
    run, error = opened.run, score.standard_error
    return Result(
        time=round(time.time(), 3),
        round=run.round if run else None,
        tokens=run.tokens if run else None,
        task=score.task,
        metric=score.metric,
        value=score.value,
        standard_error=finite_or_none(error),
        samples=score.samples,
    )


def print_results(results: Sequence[Result], as_json: bool) -> None:
    """Print the results as JSON, or as a table."""
    if as_json:
        print(json.dumps({"results": [result.model_dump() for result in results]}, indent=1))
        return
    table = Table(box=None, pad_edge=False)
    for heading in RESULT_HEADINGS:
        table.add_column(heading, justify="left" if heading in ("task", "metric") else "right")
    for row in result_rows(results):
        table.add_row(*map(sanitize, row))
    table_console().print(table)
