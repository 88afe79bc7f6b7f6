"""Tokenized text on disk: memory-mapped shards of uint16 or uint32 (little endian) and a JSON header.

    header.json   {"format": "murmur tokens 1", "dtype", "vocabulary", "tokenizer", "shards": [{"name", "tokens"}]}
    00000.bin     the token ids of all files in sequence, split every SHARD_TOKENS

The end of the sequence is held out. The header is written last.
"""

import itertools
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from node.daemon.checkpoints.new_folder import fill_folder
from node.data.corpus import Shard, SourceText, TokenArray, count_held_out
from node.data.tokenizer import FileTokenizer, token_dtype
from node.monitoring.status_line import ByteProgress
from protocol.errors import DataError, MissingFileError, UsageError
from protocol.fault_words import describe_value
from protocol.manifest.sections import SourceSection

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


def open_tokens(config: SourceSection, base: Path, validation_share: float, tokenizer: str) -> SourceText:
    """Open a folder that `tokenize_files` wrote with the tokenizer of this digest; empty means bytes.

    Raises MissingFileError or DataError.
    """
    if not config.path:
        raise DataError(f"{config.key}.path is empty; set it to a folder that `murmur tokenize` wrote")
    folder = base / config.path
    header = _read_header(folder / HEADER_FILE)
    _require_tokenizer(folder, header.tokenizer, tokenizer)
    tokens = TokenArray([_map_shard(folder / entry.name, header.dtype, entry.tokens) for entry in header.shards])
    if len(tokens) < 2:
        raise DataError(f"{folder} holds no tokens; run `murmur tokenize` on files with text")
    cut = len(tokens) - count_held_out(len(tokens), validation_share)
    return SourceText(tokens.slice(0, cut), tokens.slice(cut, len(tokens)), header.vocabulary, config)


def tokenize_files(tokenizer: Path, files: Sequence[Path], out: Path) -> int:
    """Encode UTF-8 files in the given order into `out`, a new or an empty folder; return the number of tokens."""
    encoder = FileTokenizer(tokenizer)
    sizes = [_require_file(path) for path in files]
    kind: Literal["uint16", "uint32"] = "uint16" if token_dtype(encoder.size) is np.uint16 else "uint32"
    with fill_folder(out) as folder, ByteProgress("tokenizing", sum(sizes)) as progress:
        shards = _write_shards(_encode_files(files, encoder, progress), folder)
        tokens = sum(entry.tokens for entry in shards)
        if tokens < 2:
            others = " and the other files hold" if len(files) > 1 else " holds"
            raise DataError(f"{files[0]}{others} no text; name files with text")
        header = ShardsHeader(dtype=kind, vocabulary=encoder.size, tokenizer=encoder.digest, shards=tuple(shards))
        (folder / HEADER_FILE).write_text(header.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return tokens


def _require_file(path: Path) -> int:
    """Return the size of a file; 0 if it is not known before it is read."""
    try:
        status = path.stat()
    except OSError as error:
        raise MissingFileError(f"cannot read {path}: {error.strerror}; name existing text files") from error
    if stat.S_ISDIR(status.st_mode):
        raise UsageError(f"{path} is a folder; name the files in it, such as {path}/*.txt")
    return status.st_size


def _require_tokenizer(folder: Path, made_with: str, expected: str) -> None:
    if made_with == expected:
        return
    if not expected:
        fault = f"with the tokenizer file of SHA-256 {made_with[:12]}..., but data.tokenizer is empty"
    elif not made_with:
        fault = "without a tokenizer file, but data.tokenizer names one"
    else:
        fault = f"with another tokenizer (SHA-256 {made_with[:12]}...) than data.tokenizer names ({expected[:12]}...)"
    raise DataError(f"{folder} was made {fault}; name its own, or run `murmur tokenize` again")


def _read_header(path: Path) -> ShardsHeader:
    try:
        return ShardsHeader.model_validate_json(path.read_bytes())
    except OSError as error:
        raise MissingFileError(f"cannot read {path}: {error.strerror}; run `murmur tokenize` to make it") from error
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in fault["loc"])
        raise DataError(f"{path}: {place}: {describe_value(fault)}; run `murmur tokenize` again") from error


def _map_shard(path: Path, kind: str, tokens: int) -> Shard:
    width = np.dtype(kind).itemsize
    try:
        size = path.stat().st_size
    except OSError as error:
        raise MissingFileError(f"cannot read {path}: {error.strerror}; run `murmur tokenize` again") from error
    if size != tokens * width:
        raise DataError(f"{path} has {size} bytes, its header says {tokens * width}; run `murmur tokenize` again")
    return np.memmap(path, dtype=np.dtype(kind).newbyteorder("<"), mode="r", shape=(tokens,))


def _encode_files(files: Sequence[Path], tokenizer: FileTokenizer, progress: ByteProgress) -> Iterator[Shard]:
    for path in files:
        is_empty = True
        for block in _read_blocks(path, progress):
            shard = tokenizer.encode(block)
            is_empty = is_empty and not len(shard)
            yield shard
        if not is_empty:
            yield tokenizer.end


def _read_blocks(path: Path, progress: ByteProgress) -> Iterator[str]:
    """Yield the text of a file in blocks of whole lines, so that it need not fit into memory."""
    offset = 0
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES) + file.readline():
                yield block.decode()
                offset += len(block)
                progress.advance(len(block))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {offset + error.start}); convert it or leave it out") from error
    except OSError as error:
        raise MissingFileError(f"cannot read {path}: {error.strerror}; fix it or leave it out") from error


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
