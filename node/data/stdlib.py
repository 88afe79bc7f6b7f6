"""The Python standard library of the running interpreter: some 12 MB of real text that is on every machine already.

Left out: site-packages (whatever someone installed) and tests (large, repetitive, and the only files that are not
UTF-8, on purpose).
"""

import sysconfig
from pathlib import Path

from node.data.corpus import Corpus
from node.data.text import build_corpus
from node.data.vocabulary import TextTokenizer
from protocol.errors import MissingFileError

EXCLUDED_DIRS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
MAX_STDLIB_BYTES = 20_000_000


def open_stdlib(tokenizer: TextTokenizer, validation_share: float) -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    files = _take_up_to(list_stdlib_files(root), MAX_STDLIB_BYTES)
    if not files:
        raise MissingFileError(f"this Python has no library sources in {root}; use data.source = 'text'")
    return build_corpus(files, root, tokenizer, validation_share)


def list_stdlib_files(root: Path) -> list[Path]:
    """Every .py file that counts, sorted by its path relative to `root`."""
    found = [path for path in root.rglob("*.py") if not EXCLUDED_DIRS.intersection(path.relative_to(root).parts)]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _take_up_to(files: list[Path], max_bytes: int) -> list[Path]:
    """As many as fit into `limit` bytes."""
    chosen, total = [], 0
    for path in files:
        total += path.stat().st_size
        if total > max_bytes:
            break
        chosen.append(path)
    return chosen
