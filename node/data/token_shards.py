"""Tokenized text on disk: memory-mapped shards of uint16 or uint32 (little endian) and a JSON header.

    header.json   {"format": "murmur tokens 1", "dtype", "vocabulary", "tokenizer", "shards": [{"name", "tokens"}]}
    00000.bin     the token ids of all files in sequence, split every SHARD_TOKENS

The end of the sequence is held out. The folder is written under another name and renamed when it is complete.
"""

import hashlib
import itertools
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from node.data.corpus import Corpus, Shard, TokenArray
from node.data.tokenizer import FileTokenizer, token_dtype
from protocol.errors import DataError, MissingFileError, StorageError, UsageError

HEADER_FILE = "header.json"
SHARD_TOKENS = 2**27
BLOCK_BYTES = 2**20


class ShardEntry(BaseModel):
    """One shard in the header."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, StringConstraints(pattern=r"^[0-9]{5}\.bin$")]
    tokens: int = Field(ge=1)


class ShardsHeader(BaseModel):
    """The content of header.json. `tokenizer` is the SHA-256 of the tokenizer file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["murmur tokens 1"] = "murmur tokens 1"
    dtype: Literal["uint16", "uint32"]
    vocabulary: int = Field(ge=1, le=2**32)
    tokenizer: str
    shards: tuple[ShardEntry, ...]


def open_tokens(folder: Path, validation_share: float) -> Corpus:
    """Open a folder that `tokenize_files` wrote; raises MissingFileError or DataError."""
    header = _read_header(folder / HEADER_FILE)
    tokens = TokenArray([_map_shard(folder / entry.name, header.dtype, entry.tokens) for entry in header.shards])
    if len(tokens) < 2:
        raise DataError(f"{folder} holds no tokens; run `murmur tokenize` on files with text")
    cut = len(tokens) - max(1, int(len(tokens) * validation_share))
    return Corpus(tokens.slice(0, cut), tokens.slice(cut, len(tokens)), header.vocabulary)


def tokenize_files(tokenizer: Path, files: Sequence[Path], out: Path) -> ShardsHeader:
    """Encode UTF-8 files in the given order into the new folder `out`."""
    if out.exists():
        raise UsageError(f"{out} exists already; name a new folder")
    encoder = FileTokenizer(tokenizer)
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        shards = _write_shards(_encode_files(files, encoder), partial)
        digest = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
        kind: Literal["uint16", "uint32"] = "uint16" if token_dtype(encoder.size) is np.uint16 else "uint32"
        header = ShardsHeader(dtype=kind, vocabulary=encoder.size, tokenizer=digest, shards=tuple(shards))
        (partial / HEADER_FILE).write_text(header.model_dump_json(indent=1) + "\n")
        partial.rename(out)
    except OSError as error:
        raise StorageError(f"cannot write {out}: {error.strerror}; free space or name another folder") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return header


def _read_header(path: Path) -> ShardsHeader:
    try:
        return ShardsHeader.model_validate_json(path.read_bytes())
    except OSError as error:
        raise MissingFileError(f"cannot read {path}: {error.strerror}; run `murmur tokenize` to make it") from error
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in fault["loc"])
        raise DataError(f"{path}: {place}: {fault['msg']}; run `murmur tokenize` again") from error


def _map_shard(path: Path, kind: str, tokens: int) -> Shard:
    width = np.dtype(kind).itemsize
    try:
        size = path.stat().st_size
    except OSError as error:
        raise MissingFileError(f"cannot read {path}: {error.strerror}; run `murmur tokenize` again") from error
    if size != tokens * width:
        raise DataError(f"{path} has {size} bytes, its header says {tokens * width}; run `murmur tokenize` again")
    return np.memmap(path, dtype=np.dtype(kind).newbyteorder("<"), mode="r", shape=(tokens,))


def _encode_files(files: Sequence[Path], tokenizer: FileTokenizer) -> Iterator[Shard]:
    for path in files:
        yield from (tokenizer.encode(block) for block in _read_blocks(path))
        yield tokenizer.end


def _read_blocks(path: Path) -> Iterator[str]:
    """Yield the text of a file in blocks of whole lines, so that it need not fit into memory."""
    offset = 0
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES) + file.readline():
                yield block.decode()
                offset += len(block)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {offset + error.start}); convert it or leave it out") from error
    except FileNotFoundError as error:
        raise MissingFileError(f"no file {path}; name existing text files") from error


def _write_shards(pieces: Iterator[Shard], folder: Path) -> list[ShardEntry]:
    entries = []
    for number, group in itertools.groupby(_split_at_shards(pieces), key=lambda numbered: numbered[0]):
        name, tokens = f"{number:05}.bin", 0
        with (folder / name).open("wb") as file:
            for _, piece in group:
                file.write(piece.astype(piece.dtype.newbyteorder("<")).tobytes())
                tokens += len(piece)
        entries.append(ShardEntry(name=name, tokens=tokens))
    return entries


def _split_at_shards(pieces: Iterator[Shard]) -> Iterator[tuple[int, Shard]]:
    """Split pieces where a shard ends, and yield each with the number of its shard."""
    written = 0
    for piece in pieces:
        while len(piece):
            number, used = divmod(written, SHARD_TOKENS)
            head, piece = piece[: SHARD_TOKENS - used], piece[SHARD_TOKENS - used :]
            written += len(head)
            yield number, head
