"""`murmur init`: write a first manifest with comments, from five questions or from flags.

The file is checked like any manifest before it is written, and its text names the commands that come next. The
organiser's key is created with the first manifest, because the run id contains its peer id.
"""

import glob
import json
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import typer

from node.commands.plan.peers import CPU_PARAMETERS
from node.commands.run_sizes import (
    BUSY,
    MAX_RECORDED_PEERS,
    RECORDED,
    SIZES,
    SizeFacts,
    find_facts,
    recorded_facts,
    work_key,
    work_values,
)
from node.own_modules import allow_modules, load_module
from node.paths import organiser_key_path
from node.run_dir import read_json_if_whole
from node.run_file import parse_run_text
from node.units import format_bytes, format_count, parse_count
from protocol.errors import MissingFileError, MurmurError, StorageError, UsageError
from protocol.identity import Identity
from protocol.manifest.reading import parse_manifest
from protocol.manifest.run import Manifest
from protocol.manifest.sections import NAME_PATTERN
from protocol.scored_tasks import TASKS, ScoredTask, tasks_in
from protocol.signing import fingerprint

DEFAULT_RECIPE = "frugal"
STDLIB = "python-stdlib"
BYTES_VOCABULARY = 256
DEFAULT_SIZE = "small"
NO_SCHEDULE: Final[Mapping[str, int]] = MappingProxyType({})
TOKENS_PER_PARAMETER = 20  # compute-optimal, arXiv 2203.15556
GLOB_CHARACTERS = "*?["
PROMPT_WIDTH = 76
SHARD_HEADER = "header.json"  # of token shards
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
MAX_SHOWN_KINDS = 4


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """The command line of `murmur init`. `None` means not given: the command asks, or takes the default."""

    name: str | None = None
    description: str | None = None
    text: str | None = None
    size: str | None = None
    peers: int | None = None
    tokens: str | None = None
    tokenizer: str = ""
    organiser: str = ""
    licence: str = ""
    recipe: str = DEFAULT_RECIPE
    public: bool = False
    rl: str = ""


@dataclass(frozen=True)
class DataChoice:
    """The [data] table, and the number of token ids."""

    source: str
    path: str
    tokenizer: str
    vocabulary: int


def init(target: Path, options: InitOptions, ask: bool) -> None:
    """Write the manifest `target` and print the next commands.

    Args:
        ask: whether to ask for the values that the options leave open.

    Raises:
        UsageError: `target` exists, or a value cannot be used.
        MurmurError: the manifest would be invalid, or the tokenizer or the task cannot be used.
    """
    if target.exists():
        raise UsageError(f"{target} exists; name another file, or remove it first")
    if options.rl:
        require_sound_task(options.rl)
    answers = _ask_questions(options, target) if ask else options
    key = Identity.load_or_create(_prepare_key_path())
    folder = target.resolve().parent

    def parse(text: str) -> Manifest:
        return parse_run_text(text.encode(), str(target), folder).manifest

    facts = facts_of(parse(manifest_text(answers, folder, key.peer_id)), answers)
    text = manifest_text(answers, folder, key.peer_id, facts.schedule())
    manifest = parse(text)
    _write(target, text)
    for line in next_steps(target, manifest, organiser_key_path(), facts, own_module(answers.rl)):
        typer.echo(line)


def facts_of(manifest: Manifest, options: InitOptions) -> SizeFacts:
    """Return what the run takes: recorded, or computed if its vocabulary, peers or recipe are unusual.

    Raises ManifestError if the recipe is unknown.
    """
    key = check_size(options.size or DEFAULT_SIZE), options.recipe
    is_usual = manifest.model.vocabulary == BYTES_VOCABULARY and manifest.run.min_peers <= MAX_RECORDED_PEERS
    recorded = recorded_facts().get(key) if is_usual else None
    return recorded or find_facts(manifest)


def _prepare_key_path() -> Path:
    path = organiser_key_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StorageError(f"cannot create {path.parent}: {error.strerror}; set XDG_STATE_HOME") from error
    return path


def _write(target: Path, text: str) -> None:
    """Write the new file with the mode that other new files get."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if not isinstance(error, FileExistsError):
            target.unlink(missing_ok=True)  # half a manifest
        raise StorageError(f"cannot write {target}: {error.strerror}; name another file") from error


def _ask_questions(options: InitOptions, target: Path) -> InitOptions:
    """Ask for each of the five values that has no flag, again if the answer cannot be used."""
    typer.echo("Five questions; Enter takes the value in brackets.")
    given = {field.name: getattr(options, field.name) for field in fields(options)}

    def check_text(answer: str) -> str:
        choose_data(answer, options.tokenizer, target.resolve().parent)
        return answer

    texts = f"a pattern such as texts/**/*.txt, a folder, hf:NAME of a data set, or {STDLIB}"
    questions: tuple[tuple[str, str, str, str, Callable[[str], object]], ...] = (
        ("name", "1. Name of the run", "", _default_name(target), check_name),
        ("description", "2. What is the run for? One sentence", "", "", str),
        ("text", "3. Text to train on", texts, STDLIB, check_text),
        ("size", "4. Size of the model", describe_sizes(), DEFAULT_SIZE, check_size),
        ("peers", "5. Peers to wait for before the first round", "", "2", parse_peers),
    )
    for field, question, choices, default, check in questions:
        if given[field] is None and not (field == "text" and options.rl):
            typer.echo("".join(f"   {line}\n" for line in textwrap.wrap(choices, PROMPT_WIDTH)), nl=False)
            given[field] = typer.prompt(
                question, default=default, show_default=bool(default), value_proc=partial(_check_answer, check)
            )
    return InitOptions(**given)


def _check_answer(check: Callable[[str], object], answer: str) -> object:
    """Check an answer; typer asks again after its own error."""
    try:
        return check(answer)
    except MurmurError as error:
        raise typer.BadParameter(str(error)) from error


def check_name(name: str) -> str:
    """Return the name of a run. Raises UsageError."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise UsageError(f"{name[:40]!r} is not a name; use a-z, 0-9, '-', '.' and '_', at most 64 characters")
    return name


def check_size(size: str) -> str:
    """Return the name of a size, from its name in any case or its number from 1. Raises UsageError."""
    word, names = size.strip().lower(), list(SIZES)
    if word in names:
        return word
    if word.isascii() and word.isdigit() and 1 <= int(word[:9]) <= len(names):
        return names[int(word) - 1]
    raise UsageError(f"{size[:40]!r} is not a size; write one of {', '.join(SIZES)}, or 1 to {len(SIZES)}")


def parse_peers(text: str) -> int:
    """Return a number of peers. Raises UsageError."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= 10_000:
        raise UsageError(f"{text[:40]!r} is not a number of peers; write one from 1 to 10000")
    return int(text)


def describe_sizes() -> str:
    """Return the sizes with their numbers and parameters."""
    sizes = enumerate(SIZES.items(), start=1)
    return ", ".join(f"{number} {name} ({format_count(size.parameters())})" for number, (name, size) in sizes)


def _default_name(target: Path) -> str:
    """Return the name of the manifest's file or folder, in the characters that a run's name may have."""
    stem = target.stem if target.stem != "run" else target.resolve().parent.name
    kept = "".join(char if char in "abcdefghijklmnopqrstuvwxyz0123456789-_." else "-" for char in stem.lower())
    return kept.strip("-_.")[:64] or "my-run"


def choose_data(text: str, tokenizer: str, folder: Path) -> DataChoice:
    """Return the data source that a text of the user means.

    Relative paths start in the working directory; the manifest in `folder` names the same files.

    Raises:
        UsageError: there is no such text.
        MissingFileError, DataError: the tokenizer cannot be read.
    """
    vocabulary = _vocabulary_of(Path(tokenizer)) if tokenizer else BYTES_VOCABULARY
    tokenizer = _from_folder(tokenizer, folder) if tokenizer else ""
    if text == STDLIB:
        return DataChoice(STDLIB, "", tokenizer, vocabulary)
    if text.startswith("hf:"):
        return DataChoice("hf", text.removeprefix("hf:"), tokenizer, vocabulary)
    path, from_folder = Path(text), _from_folder(text, folder)
    if (path / SHARD_HEADER).is_file():
        found = read_json_if_whole(path / SHARD_HEADER).get("vocabulary")
        return DataChoice("tokens", from_folder, tokenizer, found if isinstance(found, int) else vocabulary)
    if path.is_dir():
        require_text(text, [file for file in path.rglob("*.txt") if file.is_file()], path)
        return DataChoice("text", f"{from_folder}/**/*.txt", tokenizer, vocabulary)
    if path.is_file():
        require_text(text, [path])
        return DataChoice("text", from_folder, tokenizer, vocabulary)
    if any(char in text for char in GLOB_CHARACTERS):
        require_text(text, [Path(found) for found in glob.glob(text, recursive=True) if Path(found).is_file()])
        return DataChoice("text", from_folder, tokenizer, vocabulary)
    raise UsageError(f"there is no text {path}; name files, a folder, hf:NAME of a data set, or {STDLIB}")


def require_text(given: str, files: Sequence[Path], folder: Path | None = None) -> None:
    """Raise UsageError, which says what is there instead, unless one of the files can hold text."""
    if not files and folder is not None:
        kinds = sorted({file.suffix or file.name for file in folder.rglob("*") if file.is_file()})
        others = f"only {', '.join(kinds[:MAX_SHOWN_KINDS])}" if kinds else "no file at all"
        raise UsageError(f"{given} has no .txt file, {others}; name files by a pattern, such as '{given}/**/*.md'")
    if not files:
        raise UsageError(f"no file matches {given}; name existing text files")
    if all(file.suffix in COMPRESSED for file in files):
        raise UsageError(f"{files[0]} is compressed; unpack it and name the text, or name a data set by hf:FOLDER")
    if not any(file.stat().st_size for file in files):
        raise UsageError(f"{files[0]} is empty; name files with text")


def _vocabulary_of(tokenizer: Path) -> int:
    """Return the number of token ids. Raises MissingFileError or DataError."""
    if not tokenizer.is_file():
        raise MissingFileError(f"there is no tokenizer {tokenizer}; name a Hugging Face tokenizer.json")
    from node.data.tokenizer import FileTokenizer  # loads torch

    return FileTokenizer(tokenizer).size


def _from_folder(path: str, folder: Path) -> str:
    return path if Path(path).is_absolute() else os.path.relpath(path, folder)


def manifest_text(
    options: InitOptions, folder: Path, organiser_key: str, schedule: Mapping[str, int] = NO_SCHEDULE
) -> str:
    """Return the manifest as commented TOML; `schedule` has the options that differ from the recipe's."""
    task = find_task(options.rl) if options.rl else None
    size, data = SIZES[check_size(options.size or DEFAULT_SIZE)], choose_run_data(options, folder, task)
    rl = rl_sizes(task, size.batch_tokens) if task is not None else RlSizes(size.context, 0)
    size = replace(size, context=rl.context)
    peers = options.peers or 2
    default = TOKENS_PER_PARAMETER * size.parameters(data.vocabulary)
    tokens = parse_count(options.tokens, "--tokens") if options.tokens else default
    steps = max(1, tokens // (size.batch_tokens * peers))
    values: dict[str, object] = {
        "name": check_name(options.name or "my-run"),
        "peers": peers,
        "key": organiser_key,
        "description": options.description or "",
        "organiser": options.organiser,
        "licence": options.licence,
        "source": data.source,
        "path": data.path,
        "tokenizer": data.tokenizer,
        "recipe": options.recipe,
        "task": task.name if task is not None else "",
        "module": Path(options.rl).stem,
    }
    quoted = {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}
    numbers: dict[str, object] = {
        "vocabulary": data.vocabulary,
        "tokens": tokens,
        "steps": steps,
        "warmup": max(1, steps // 50),
        "answer_tokens": rl.answer_tokens,
        "start_round": RL_START_ROUNDS.get(options.rl, RL_START_ROUND),
    }
    if schedule:
        pairs = ", ".join(f"{name} = {value}" for name, value in schedule.items())
        numbers["schedule"] = f"{{ {pairs} }}"
    template = _template(options, has_schedule=bool(schedule))
    return "".join(_fill_line(line, quoted | vars(size) | numbers) for line in template.splitlines())


def choose_run_data(options: InitOptions, folder: Path, task: ScoredTask | None) -> DataChoice:
    """Return the text of a run: right answers to the questions of its task, unless a text is named."""
    chosen = choose_data(options.text or STDLIB, options.tokenizer, folder)
    if task is not None and options.text is None:
        return replace(chosen, source="questions", path=task.name)
    return chosen


def own_module(rl: str) -> str:
    """Return the file of a task of the user's own; empty if `--rl` names another one, or none."""
    return rl if rl.endswith(".py") else ""


def find_task(rl: str) -> ScoredTask:
    """Return the task that `--rl` names: one of ours, or that of a Python file, which is imported.

    Raises UsageError or ComponentError if there is none.
    """
    known = ", ".join(TASKS)
    if not own_module(rl):
        if rl not in TASKS:
            raise UsageError(
                f"{rl[:40]!r} is not a task; write one of {known}, or a file with your own, like mytask.py"
            )
        return TASKS[rl]
    if not Path(rl).is_file():
        raise UsageError(f"there is no file {rl}; write the Python file of your task, or one of {known}")
    (source,) = allow_modules([rl])
    kinds = list(tasks_in(load_module(source.line)))
    if len(kinds) != 1:
        raise UsageError(f"{rl} has {len(kinds)} tasks; it needs one class of ScoredTask with a name and no more")
    return kinds[0]()


def require_sound_task(rl: str) -> None:
    """Raise UsageError or ComponentError if there is no such task, or it breaks a promise of tasks."""
    task = find_task(rl)
    if not own_module(rl):
        return
    from node.task_checks import check_task

    if faults := check_task(type(task)):
        more = f" (and {len(faults) - 1} more: murmuration.check_component)" if len(faults) > 1 else ""
        raise UsageError(f"{rl}: {faults[0]}{more}")


class RlSizes(NamedTuple):
    """Tokens of a question with its answer, and of the answer."""

    context: int
    answer_tokens: int


def rl_sizes(task: ScoredTask, batch_tokens: int) -> RlSizes:
    """Choose sizes with room for the questions of a task as bytes. Raises UsageError if they exceed a batch."""
    asked = [task.question("init", number) for number in range(SIZED_QUESTIONS)]
    prompt = max(len(question.prompt.encode()) for question in asked)
    answer = max(len(f"{task.right_answer(question)}\n".encode()) for question in asked)
    answer_tokens = max(RL_ANSWER_TOKENS, answer + answer // 4)
    needed = prompt + prompt // 4 + answer_tokens
    context = next((each for each in RL_CONTEXTS if needed <= each <= batch_tokens), 0)
    if not context:
        raise UsageError(
            f"questions of {prompt} bytes with answers of {answer} are too long for the model; shorten them, or take a "
            "larger --size"
        )
    return RlSizes(context, answer_tokens)


def _template(options: InitOptions, *, has_schedule: bool) -> str:
    template = TEMPLATE if has_schedule and not options.rl else TEMPLATE.replace(SCHEDULE_LINE, "")
    if options.rl:
        template = template.replace(DECAY_LINE, "").replace(TARGET_LINE, "") + RL_TEMPLATE
    if options.rl and options.recipe == DEFAULT_RECIPE:
        template = template.replace(RECIPE_LINE, RECIPE_LINE + DENSE_LINE)
    if options.rl and options.text is None:
        template = template.replace(PATH_LINE, QUESTIONS_LINE)
    if own_module(options.rl):
        template = template.replace(RECIPE_LINE, RECIPE_LINE + MODULES_LINE)
    return template + (PUBLIC_TEMPLATE if options.public else "")


def _fill_line(line: str, values: Mapping[str, object]) -> str:
    """Fill in a line of the template, and align the comment behind a value."""
    code, separator, comment = line.partition("  # ")
    filled = code.format(**values)
    return f"{filled:<26}  # {comment}\n" if separator and "=" in code else f"{filled}{separator}{comment}\n"


PUBLIC_TEMPLATE = """
[admission]
mode = "tickets"  # only keys to which you give a ticket take part: murmur ticket RUN.toml KEY
"""

RL_TEMPLATE = """rounds = 300

[rl]  # the model learns from scores of its own answers, which rollout peers draw: murmur join RUN --role rollout
task = {task}
start_round = {start_round}  # rounds before it learn the text of [data]; fewer leave more to scores
group = 8  # answers to a question
groups = 16  # of an inner step
answer_tokens = {answer_tokens}
rate_factor = 0.25  # of the learning rate
"""

DECAY_LINE = "decay_steps = {steps}  # about the steps of one peer until the target\n"
TARGET_LINE = "tokens = {tokens}  # of all peers together; the run ends there\n"
RL_CONTEXTS = (64, 128, 256, 512, 1024)  # tokens of a question and its answer
RL_ANSWER_TOKENS = 24  # or more
RL_START_ROUND = 30
RL_START_ROUNDS = {"brackets": 12, "reverse": 12}  # easy ones, of which more rounds leave little to scores
SIZED_QUESTIONS = 256
PATH_LINE = "path = {path}  # relative to this file; each peer needs the text itself\n"
QUESTIONS_LINE = "path = {path}  # right answers to the questions of this task\n"
RECIPE_LINE = "recipe = {recipe}  # others: murmur recipes\n"
DENSE_LINE = (  # else the weights that draw are rounds behind those that learn
    'codec = {{ kind = [{{ value = "int8", rounds = {start_round} }}, "topk"] }}  # all values while text is learned\n'
)
MODULES_LINE = "modules = [{module}]  # with your task; an edit of the file makes another run\n"
SCHEDULE_LINE = "schedule = {schedule}  # rounds long enough for home links: murmur plan\n"
TEMPLATE = """\
# A run of Murmuration. All keys: docs/reference/manifest.md. Anyone who has this file can join.
# The run id is the hash of the values below without [about], so a change of any other value starts a new run.
# `murmur steer` changes the target, the learning rate and the deadlines of this run while it trains.

[run]
name = {name}
min_peers = {peers}  # peers that must be present before the first round
organiser_key = {key}  # this key may steer the run

[about]  # facts for people, shown on the page
description = {description}
organiser = {organiser}
licence = {licence}  # of the model, such as Apache-2.0

[model]  # a decoder-only transformer
vocabulary = {vocabulary}  # 256: the text is read as bytes
width = {width}
layers = {layers}
heads = {heads}
hidden = {hidden}
context = {context}  # tokens per sequence

[data]
source = {source}
path = {path}  # relative to this file; each peer needs the text itself
tokenizer = {tokenizer}  # empty: bytes

[train]
batch_tokens = {batch_tokens}  # per step on one peer
microbatch = {microbatch}  # sequences at once; a machine with little memory takes fewer by itself
learning_rate = {learning_rate}
warmup_steps = {warmup}
decay_steps = {steps}  # about the steps of one peer until the target

[method]
recipe = {recipe}  # others: murmur recipes
schedule = {schedule}  # rounds long enough for home links: murmur plan

[target]
tokens = {tokens}  # of all peers together; the run ends there
"""


def next_steps(target: Path, manifest: Manifest, key: Path, facts: SizeFacts, module: str = "") -> list[str]:
    """Return the lines that follow a new manifest: the size of the run, and the commands to go on with.

    Args:
        module: the file of a task of one's own; every machine of the run has to allow it.
    """
    allowed = f" --import {module}" if module else ""
    recipe = manifest.method.recipe
    of_cpus = "CPUs suffice: cards would train so small a model faster than home links carry its rounds"
    slow = (
        f"typical volunteers would train {facts.busy:.0%} of the time, and wait for rounds else: a larger model"
        f"{'' if recipe == DEFAULT_RECIPE else f', or {DEFAULT_RECIPE},'} keeps them busy (`murmur plan` says more)"
    )
    return [
        f"wrote {target}: run {manifest.run.name}, {format_count(facts.parameters)} parameters, "
        + (
            f"{format_count(manifest.target.tokens)} tokens"
            if manifest.target.tokens
            else f"{manifest.target.rounds} rounds"
        ),
        *([of_cpus] if facts.parameters < CPU_PARAMETERS else []),
        *([slow] if facts.busy < BUSY else []),
        f"a peer needs at least {format_bytes(facts.cpu)} on a CPU, or {format_bytes(facts.cuda)} of a card's memory",
        f"your key as organiser is {key}; keep a copy, because it alone can steer the run",
        f"its fingerprint, which volunteers compare, is {fingerprint(manifest.run.organiser_key)}",
        f"try it here:     {_trial(target, manifest)}{allowed}",
        f"open it:         murmur host {target} --http 0.0.0.0:8080 --listen /ip4/0.0.0.0/tcp/4001{allowed}",
        *([f"draw rollouts:   murmur join LINK --role rollout{allowed}"] if manifest.rl is not None else []),
    ]


def _trial(target: Path, manifest: Manifest) -> str:
    """Return the command that tries a run on this machine; `murmur up` has no rollout peers."""
    return f"murmur host {target} --train" if manifest.rl is not None else f"murmur up {target} --peers 2 --rounds 5"


def measure_all() -> list[dict[str, Any]]:
    """Return the facts of the default manifest of each size with each recipe, and the work of the one with its pace."""
    from node.commands.capacity import workload_of
    from optim.recipes import RECIPES

    rows = []
    for size in SIZES:
        for recipe in RECIPES:
            options = InitOptions(size=size, recipe=recipe)
            facts = find_facts(parse_manifest(manifest_text(options, Path(), "").encode(), size))
            paced = parse_manifest(manifest_text(options, Path(), "", facts.schedule()).encode(), size)
            work = {"key": work_key(paced), "work": work_values(workload_of(paced))}
            rows.append({"size": size, "recipe": recipe, "facts": asdict(facts), **work})
    return rows


if __name__ == "__main__":
    RECORDED.write_text("[\n" + ",\n".join(json.dumps(row) for row in measure_all()) + "\n]\n")
