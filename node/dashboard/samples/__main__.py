"""`python -m node.dashboard.samples FOLDER BASE [PROMPT]`: print one sample of the newest model in FOLDER, as JSON.

The process is the first one that the kernel ends when memory is short, and it ends itself at the deadline.
"""

import glob
import itertools
import json
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from node.processes.process import rare_garbage_collection

with rare_garbage_collection():
    import torch

    from node.commands.doctor.checks import free_memory
    from node.daemon.checkpoints.checkpoint import ANCHOR
    from node.dashboard.events import MAX_SAMPLE_CHARACTERS
    from node.dashboard.samples.sampler import DEADLINE_SECONDS, Sample
    from node.data.chat import ChatEncoder, ChatTemplate, open_encoder
    from node.data.conversations import read_conversations
    from node.data.corpus import is_held_out
    from node.data.skipped_rows import SkipLog
    from node.data.text_files import list_stdlib_files
    from node.model import shape_table
    from node.model.adapter import frozen_bytes
    from node.model.generate import Sampling, continue_text
    from node.model.opened_model import open_folder
    from node.monitoring.logs import sanitize
    from node.own_tasks import known_tasks
    from node.paths import newest_checkpoints
    from node.processes.workers import give_way
    from protocol.errors import CheckpointError, MurmurError
    from protocol.manifest.reading import load_manifest
    from protocol.manifest.run import Manifest
    from protocol.manifest.sections import DataSection, SourceSection

PROMPT_CHARACTERS = 48
READ_BYTES = 4000
FIXED_PROMPT = "The "
FIXED_QUESTION = "Can you introduce yourself?"
HELD_OUT_QUESTIONS = "samples"  # in the place of a run's id
QUESTION_CHARACTERS = 200
TOKENS = 60
BYTE_TOKENS = 240  # if each token is one byte
WRITING_SECONDS = 45.0  # then the text ends as it is
COPIES = 2  # the pages of the file, and the weights of the model
MAX_MEMORY_SHARE = 0.5  # of the free memory


def choose_prompt(data: DataSection, base: Path, modules: Sequence[str] = ()) -> str:
    """Return the first words of held-out text that is here as files; a fixed word for other sources.

    `base` is the folder of the manifest, to which paths are relative. Of several sources, that of the largest weight
    gives the words.
    """
    source = max(data.mixture, key=lambda source: source.weight, default=None)
    if data.chat is not None:
        return _choose_question(data, source, base, modules)
    if source is None:
        return FIXED_PROMPT
    if source.source == "questions" and (task := known_tasks(modules).get(source.path)):
        return task.question(HELD_OUT_QUESTIONS, 0).prompt
    if source.source == "python-stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        return first_words(_read_held_out(list_stdlib_files(root), root, data.validation_share))
    if source.source == "text":
        files = [Path(name) for name in sorted(glob.glob(os.path.join(base, source.path), recursive=True))]
        root = Path(base.anchor or "/") if Path(source.path).is_absolute() else base
        return first_words(_read_held_out([path for path in files if path.is_file()], root, data.validation_share))
    return FIXED_PROMPT


def _choose_question(data: DataSection, source: SourceSection | None, base: Path, modules: Sequence[str]) -> str:
    """Return the first question of held-out conversations that are here as files; a fixed one for other sources."""
    if source is None or source.source == "hf":
        return FIXED_QUESTION
    if source.source == "questions" and (task := known_tasks(modules).get(source.path)):
        return task.question(HELD_OUT_QUESTIONS, 0).prompt.strip()
    encoder = open_encoder(data, base)
    assert isinstance(encoder, ChatEncoder), "the texts are conversations"
    with suppress(MurmurError, OSError):  # the files may be on other machines only
        for text in read_conversations(source, base, encoder, data.validation_share, SkipLog()):
            if is_held_out(text.encode(), data.validation_share):
                asked = (message["content"] for message in json.loads(text) if message["role"] == "user")
                return sanitize(next(asked, FIXED_QUESTION))[:QUESTION_CHARACTERS]
    return FIXED_QUESTION


def first_words(text: str) -> str:
    """Return the words at the beginning of the first line that has at least two; without one, a fixed word."""
    line = next((sanitize(line.strip()) for line in text.splitlines() if len(line.split()) > 1), "")
    if len(line) <= PROMPT_CHARACTERS:
        return line or FIXED_PROMPT
    return line[:PROMPT_CHARACTERS].rpartition(" ")[0] or line[:PROMPT_CHARACTERS]


def _read_held_out(files: Sequence[Path], root: Path, validation_share: float) -> str:
    """Read the beginning of the first held-out file, or of a single file's held-out end."""
    if not files:
        return ""
    held_out = [path for path in files if is_held_out(path.relative_to(root).as_posix().encode(), validation_share)]
    path = files[0] if len(files) == 1 or not held_out else held_out[0]
    try:
        with path.open("rb") as file:
            if len(files) == 1:
                file.seek(int(path.stat().st_size * (1 - validation_share)))
                file.readline()  # the rest of a line
            return file.read(READ_BYTES).decode(errors="ignore")
    except OSError:
        return ""  # the text may be on other machines only


def main(arguments: list[str]) -> int:
    """Print the sample; returns the exit code of an error, after one line on standard error."""
    signal.alarm(int(DEADLINE_SECONDS))
    give_way()
    torch.set_num_threads(1)
    folder, base = Path(arguments[0]), Path(arguments[1])
    try:
        manifest = load_manifest(folder / "run.toml")
        require_memory(folder, free_memory() - _frozen_bytes(manifest))
        prompt = arguments[2] if len(arguments) > 2 else choose_prompt(manifest.data, base, manifest.method.modules)
        print(write_sample(folder, prompt, token_count(manifest)).model_dump_json())
    except MurmurError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def require_memory(folder: Path, free: int) -> None:
    """Raise CheckpointError if the newest model needs too much of the `free` bytes of memory."""
    size = sum((saved / ANCHOR).stat().st_size for saved in newest_checkpoints(folder))
    if COPIES * size > MAX_MEMORY_SHARE * free:
        raise CheckpointError(f"the model of {size / 1e9:.1f} GB is too large for the free memory of this machine")


def _frozen_bytes(manifest: Manifest) -> int:
    """Return the bytes of the model that an adapter changes; 0 without one."""
    adapter, model = manifest.adapter, manifest.model.with_adapter(None)
    return 0 if adapter is None else frozen_bytes(shape_table(model).entries, adapter.base)


def token_count(manifest: Manifest) -> int:
    """Return the length of a sample, which is about the same text whether tokens are bytes or words."""
    has_bytes = not manifest.data.tokenizer and all(source.source != "tokens" for source in manifest.data.mixture)
    return BYTE_TOKENS if has_bytes else TOKENS


def write_sample(folder: Path, prompt: str, tokens: int) -> Sample:
    """Continue the prompt, or answer the question, until all tokens are written or the time is over."""
    opened, deadline = open_folder(folder), time.monotonic() + WRITING_SECONDS
    assert opened.run is not None, "it is the folder of a node"
    chat = opened.run.manifest.data.chat
    template = None if chat is None else ChatTemplate(chat)
    asked = prompt if template is None else template.prompt([{"role": "user", "content": prompt}])
    text = "".join(_until(continue_text(opened, asked, tokens, Sampling()), deadline))
    if template is not None and template.end_of_answer:
        text = text.partition(template.end_of_answer)[0]
    return Sample(round=opened.run.round, prompt=prompt, text=text[:MAX_SAMPLE_CHARACTERS])


def _until(pieces: Iterator[str], deadline: float) -> Iterator[str]:
    return itertools.takewhile(lambda piece: time.monotonic() < deadline, pieces)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
