"""`python -m node.dashboard.samples FOLDER BASE [PROMPT]`: print one sample of the newest model in FOLDER, as JSON.

The process is the first one that the kernel ends when memory is short, and it ends itself at the deadline.
"""

import itertools
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from node.commands.doctor.checks import free_memory
from node.daemon.checkpoints.checkpoint import ANCHOR
from node.dashboard.events import MAX_SAMPLE_CHARACTERS
from node.dashboard.samples.prompt import choose_prompt
from node.dashboard.samples.sampler import DEADLINE_SECONDS, Sample
from node.model.generate import continue_text
from node.model.opened_model import open_folder
from node.paths import newest_checkpoints
from node.processes.workers import give_way
from protocol.errors import CheckpointError, MurmurError
from protocol.manifest.reading import load_manifest
from protocol.manifest.run import Manifest

TOKENS = 60
BYTE_TOKENS = 240  # if each token is one byte
WRITING_SECONDS = 45.0  # then the text ends as it is
COPIES = 2  # the pages of the file, and the weights of the model
MAX_MEMORY_SHARE = 0.5  # of the free memory


def main(arguments: list[str]) -> int:
    """Print the sample; returns the exit code of an error, after one line on standard error."""
    signal.alarm(int(DEADLINE_SECONDS))
    give_way()
    torch.set_num_threads(1)
    folder, base = Path(arguments[0]), Path(arguments[1])
    try:
        manifest = load_manifest(folder / "run.toml")
        require_memory(folder, free_memory())
        prompt = arguments[2] if len(arguments) > 2 else choose_prompt(manifest.data, base)
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


def token_count(manifest: Manifest) -> int:
    """Return the length of a sample, which is about the same text whether tokens are bytes or words."""
    has_bytes = not manifest.data.tokenizer and all(source.source != "tokens" for source in manifest.data.mixture)
    return BYTE_TOKENS if has_bytes else TOKENS


def write_sample(folder: Path, prompt: str, tokens: int) -> Sample:
    """Continue the prompt, until all tokens are written or the time is over."""
    opened, deadline = open_folder(folder), time.monotonic() + WRITING_SECONDS
    text = "".join(_until(continue_text(opened, prompt, tokens), deadline))
    assert opened.run is not None, "it is the folder of a node"
    return Sample(round=opened.run.round, prompt=prompt, text=text[:MAX_SAMPLE_CHARACTERS])


def _until(pieces: Iterator[str], deadline: float) -> Iterator[str]:
    return itertools.takewhile(lambda piece: time.monotonic() < deadline, pieces)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
