"""The beginning of a sample: the first words of the held-out text, or a fixed word."""

import glob
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from node.data.corpus import is_held_out
from node.data.text_files import list_stdlib_files
from node.monitoring.logs import sanitize
from protocol.manifest.sections import DataSection

PROMPT_CHARACTERS = 48
READ_BYTES = 4000
FIXED_PROMPT = "The "


def choose_prompt(data: DataSection, base: Path) -> str:
    """Return the first words of held-out text that is at hand as files; a fixed word for other sources.

    `base` is the folder of the manifest, to which paths are relative. Of several sources, that of the largest weight
    gives the words.
    """
    source = max(data.mixture, key=lambda source: source.weight, default=None)
    if source is None:
        return FIXED_PROMPT
    if source.source == "python-stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        return first_words(_read_held_out(list_stdlib_files(root), root, data.validation_share))
    if source.source == "text":
        files = [Path(name) for name in sorted(glob.glob(os.path.join(base, source.path), recursive=True))]
        root = Path(base.anchor or "/") if Path(source.path).is_absolute() else base
        return first_words(_read_held_out([path for path in files if path.is_file()], root, data.validation_share))
    return FIXED_PROMPT


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
