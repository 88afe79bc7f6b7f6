"""Runs that only loops of the users can train (`murmuration.join`): we have no code of the model, or no data."""

from typing import Final

from node.own_modules import import_flag
from protocol.errors import UsageError
from protocol.manifest.run import Manifest

JOIN_BY: Final = "join by murmuration.join(RUN, model, optimizer) in a script of yours (docs/user/own-loop.md)"
NO_CODE: Final = f'murmur has no code of this run\'s model (model.kind = "custom"); {JOIN_BY}'
WEIGHTS_ONLY: Final = (
    'murmur has no code of this model (model.kind = "custom"); load the weights that `murmur export` writes in your own'
)
NO_DATA: Final = f'the run has no text (data.source = "own"), because each peer brings its own; {JOIN_BY}'


def needs_own_loop(manifest: Manifest) -> bool:
    """Return whether only loops of the users can train a run."""
    return manifest.model.is_custom or manifest.data.source == "own"


def join_line(run: str, manifest: Manifest | None) -> str:
    """Return the line by which others join a run, at a URL: a command, or Python for a loop of their own."""
    if manifest is None:
        return f"murmur join {run}"
    if needs_own_loop(manifest):
        return f'murmuration.join("{run}", model, optimizer)'
    return " ".join(("murmur join", run, *map(import_flag, manifest.method.modules)))


def require_our_loop(manifest: Manifest) -> None:
    """Raise UsageError if our own trainer cannot train a run."""
    if manifest.model.is_custom:
        raise UsageError(NO_CODE)
    if manifest.data.source == "own":
        raise UsageError(NO_DATA)
