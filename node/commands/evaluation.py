"""The command `murmur eval`. Heavy modules are imported inside."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from node.commands.options import MAX_COUNT, InsecureOption, JsonOption, ModelArgument, PeerOption
from node.commands.waiting import loading, say_when_interrupted

EXAMPLE = "Example: murmur eval runs/demo-1, or murmur eval runs/demo-1 --tasks tasks/quiz.yaml"
PROGRESS_BARS = "TQDM_DISABLE"  # those of lm-eval


def evaluate(
    source: ModelArgument,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks", metavar="TASK", help="lm-eval tasks: names, YAML files, folders (default: held-out text)"
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="RUN.toml", help="manifest with the held-out text (default: the run's)"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, max=MAX_COUNT, help="most windows of text, or examples of each task")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, max=4096, help="sequences at a time (default: 8, or train.microbatch if less)")
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="device to compute on: auto, cpu, cuda or cuda:1")
    ] = "auto",
    peer: PeerOption = None,
    insecure: InsecureOption = False,
    allow_data: Annotated[
        bool, typer.Option("--allow-data", help="let a downloaded manifest stream its data set from the internet")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a model on held-out text, or on tasks of lm-eval, and note the results in its folder."""
    if not sys.stderr.isatty():
        os.environ.setdefault(PROGRESS_BARS, "1")
    with say_when_interrupted("no result was noted"):
        with loading():
            from node.commands.eval.command import EvalOptions, print_results
            from node.commands.eval.command import evaluate as run_evaluation
        options = EvalOptions(
            source=source,
            tasks=tuple(tasks or ()),
            data=data,
            limit=limit,
            batch=batch,
            device=device,
            peers=tuple(peer or ()),
            insecure=insecure,
            allow_data=allow_data,
        )
        results = run_evaluation(options)
    print_results(results, as_json)
