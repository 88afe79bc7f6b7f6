"""Name the source of text in every error about it."""

from collections.abc import Iterator
from contextlib import contextmanager

from protocol.errors import DataError, MissingFileError, MurmurError, describe_error
from protocol.manifest.sections import SourceSection


@contextmanager
def name_source_faults(source: SourceSection) -> Iterator[None]:
    """Raise any error in the context as a MurmurError of one line that names the source, if it has a name."""
    try:
        yield
    except (DataError, MissingFileError) as error:
        prefix = f"source {source.name}: "
        if not source.name or str(error).startswith(prefix):
            raise
        raise type(error)(prefix + str(error)) from error
    except (MurmurError, MemoryError):
        raise
    except Exception as error:  # libraries of formats and tokenizers raise errors of many kinds
        reason = describe_error(error).splitlines()[0]
        table = source.key
        place = f"{table}.source = {source.source!r}" + (f", {table}.path = {source.path!r}" if source.path else "")
        raise DataError(f"cannot read the text ({place}): {type(error).__name__}: {reason}; check the files") from error
