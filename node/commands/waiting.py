"""Say what a command does while a person waits for it."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from node.processes.process import rare_garbage_collection


@contextmanager
def loading() -> Iterator[None]:
    """Show on a terminal that modules are imported, which may take many seconds on a busy machine."""
    from node.monitoring.status_line import activity

    with activity("loading PyTorch"), rare_garbage_collection():
        yield


@contextmanager
def say_when_interrupted(state: str) -> Iterator[None]:
    """Say after Ctrl-C in which state a command leaves what it worked on."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"murmur: stopped; {state}", err=True)
        raise
