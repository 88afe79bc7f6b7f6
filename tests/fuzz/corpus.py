"""Frames that once broke a decoder, as files `corpus/TARGET/HASH`; the tests hand all of them to the decoders again."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from tests.fuzz.run import Find

CORPUS = Path(__file__).parent / "corpus"


def folder_of(target: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", target.lower()).strip("-")


def save(finds: Iterable[Find]) -> None:
    """Add the frames of finds."""
    for find in finds:
        folder = CORPUS / folder_of(find.target)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / hashlib.sha256(find.frame).hexdigest()[:16]).write_bytes(find.frame)


def load() -> list[tuple[str, Path]]:
    """Return the folder and the file of each frame."""
    return [(path.parent.name, path) for path in sorted(CORPUS.glob("*/*"))]
