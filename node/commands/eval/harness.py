"""Our own model as one of lm-eval's, and its tasks. It needs the package lm-eval.

A task is code: a YAML file may name Python functions in its folder. So `murmur eval` only runs tasks
that its user names.
"""

import contextlib
import itertools
import logging
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import datasets
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate as harness_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from node.commands.eval.scoring import Score, Scorer
from node.model.generate import Sampling, sample_tokens, until, usable_tokens
from node.model.opened_model import OpenedModel
from protocol.errors import DataError, MissingFileError, MurmurError, UsageError, describe_error
from protocol.fault_words import shorten

MAX_NEW_TOKENS: Final = 256  # unless the task says more
SUFFIX: Final = ".yaml"


class HarnessModel(TemplateLM):  # type: ignore[misc]  # lm-eval's types are not read
    """A model that answers the requests of lm-eval's tasks."""

    def __init__(self, opened: OpenedModel, scorer: Scorer) -> None:
        super().__init__()
        self._tokenizer = opened.tokenizer
        self._scorer = scorer
        self._vocabulary = opened.config.vocabulary
        self._usable = usable_tokens(opened)

    @property
    def eot_token_id(self) -> int:
        """Return the token before a text: the one that ends the text before it, or a line break."""
        end = self._tokenizer.special_tokens.get("eos")
        return end.id if end else self.tok_encode("\n")[0]

    @property
    def max_length(self) -> int:
        """Return the most tokens that the model reads."""
        return self._scorer.context

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the tokens of a text. Raises UsageError if the model does not know one."""
        tokens: list[int] = self._tokenizer.encode(string).tolist()
        if tokens and max(tokens) >= self._vocabulary:
            raise UsageError(f"the task has a text with tokens that this model of {self._vocabulary} does not know")
        return tokens

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(before or [self.eot_token_id], chosen[-self.max_length :]) for _, before, chosen in requests]
        return list(self._scorer.score_continuations(pairs))

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return log probability and likeliness of each continuation of a context."""
        scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return scores

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log probability of each whole text, window after window."""
        windows = [self._windows(str(request.args[0])) for request in requests]
        scores = self._scorer.score_continuations(list(itertools.chain.from_iterable(windows)))
        return [math.fsum(value for value, _ in itertools.islice(scores, len(each))) for each in windows]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text after each context, up to the first stop text or the largest number of tokens."""
        return [self._generate(request.args[0], request.args[1], number) for number, request in enumerate(requests)]

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        pieces = get_rolling_token_windows(self.tok_encode(text), self.eot_token_id, self.max_length, context_len=1)
        return [make_disjoint_window(piece) for piece in pieces]

    def _generate(self, context: str, options: dict[str, Any], seed: int) -> str:
        wanted = options.get("until") or ()
        stops = [wanted] if isinstance(wanted, str) else [stop for stop in wanted if stop]
        count = int(options.get("max_gen_toks", MAX_NEW_TOKENS))
        temperature = float(options.get("temperature", 1.0)) if options.get("do_sample") else 0.0
        start = self.tok_encode(context) or [self.eot_token_id]
        end = self._tokenizer.special_tokens.get("eos")
        sampling, ends = Sampling(temperature, seed=seed), frozenset(() if end is None else (end.id,))
        tokens = sample_tokens(self._scorer.model, start, count, sampling, self._usable, ends)
        return "".join(until(self._tokenizer.decode(tokens, after=start), stops))


def run_harness(opened: OpenedModel, scorer: Scorer, tasks: Sequence[str], limit: int | None) -> list[Score]:
    """Return the scores of a model on tasks; see `evaluate_tasks`."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    groups: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for loaded in _load_tasks(tasks):
        groups |= loaded.get("groups", {})
        found |= loaded["tasks"]
    random.seed(DEFAULT_RANDOM_SEED)  # as lm-eval's own command, for tasks that draw examples
    np.random.seed(DEFAULT_OTHER_SEED)
    for task in found.values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    named = {"tasks": found, "groups": groups, "group_map": {name: each.child_names for name, each in groups.items()}}
    with _name_faults("the tasks cannot be evaluated"):
        results = harness_evaluate(HarnessModel(opened, scorer), named, limit=limit, log_samples=False)
    return list(_scores(results))


def _load_tasks(tasks: Sequence[str]) -> Iterator[Any]:
    """Yield tables of tasks; data files that a YAML file names are found from its folder. Raises MurmurError."""
    named = [task for task in tasks if not _is_path(task)]
    if named:
        manager = TaskManager()  # it reads thousands of files
        for name in named:
            if name not in manager.all_tasks:
                raise UsageError(
                    f"lm-eval has no task {shorten(name)}; `lm-eval ls tasks` lists them, or name a YAML file"
                )
            yield _load(manager, name, Path.cwd())
    for path in (Path(task).expanduser().resolve() for task in tasks if _is_path(task)):
        if not path.exists():
            raise MissingFileError(f"there is no {path}; name a task of lm-eval, its YAML file, or a folder of them")
        folder = path if path.is_dir() else path.parent
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        if path.is_file():
            yield _load(manager, str(path), folder)
            continue
        if not manager.all_subtasks:
            raise UsageError(f"{path} has no task; a task is a YAML file of lm-eval with the key task")
        for name in manager.all_subtasks:
            yield _load(manager, name, Path(manager.task_index[name].yaml_path).parent)


def _is_path(task: str) -> bool:
    return task.endswith(SUFFIX) or Path(task).expanduser().is_dir()


def _load(manager: Any, name: str, folder: Path) -> Any:
    with contextlib.chdir(folder), _name_faults(f"the task {shorten(name)} cannot be loaded"):
        return manager.load([name])


@contextlib.contextmanager
def _name_faults(fault: str) -> Iterator[None]:
    """Raise any unexpected error as a DataError: tasks are code of many authors, and raise errors of many kinds."""
    try:
        yield
    except (MurmurError, MemoryError):
        raise
    except Exception as error:
        reason = shorten(describe_error(error).splitlines()[0])
        raise DataError(f"{fault}: {type(error).__name__}: {reason}; check its YAML file and its data") from error


def _scores(results: Any) -> Iterator[Score]:
    """Yield the numbers in lm-eval's results, whose keys are METRIC,FILTER and METRIC_stderr,FILTER."""
    for task, values in results["results"].items():
        samples = results.get("n-samples", {}).get(task, {}).get("effective")
        for key, value in values.items():
            metric, _, kind = key.partition(",")
            if not kind or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{kind}")
            name = metric if kind == "none" else f"{metric},{kind}"
            yield Score(task, name, float(value), error if isinstance(error, float) else None, samples)
