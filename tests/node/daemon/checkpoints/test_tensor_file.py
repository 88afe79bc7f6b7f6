"""The safetensors library reads our files, and a file that does not match its digest is rejected."""

import hashlib
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from node.daemon.checkpoints import tensor_file
from node.daemon.checkpoints.tensor_file import (
    DamagedError,
    FileDigest,
    TensorFile,
    encode_tensors,
    write_file,
    write_tensors,
)


def tensors() -> dict[str, Tensor]:
    flat = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    return {
        "matrix": flat[:600].view(20, 30),
        "transposed": flat[600:960].view(18, 20).t(),
        "scalar": torch.tensor(2.5),
        "bytes": torch.arange(37, dtype=torch.uint8),
        "nothing": torch.empty(0, dtype=torch.uint8),
    }


def assert_same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert set(mine) == set(theirs)
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("chunk_bytes", [2**20, 64])
def test_safetensors_library_reads_our_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", chunk_bytes)
    file = tmp_path / "file"
    digest = write_file(file, encode_tensors(tensors(), {"format": "pt"}))
    assert_same(safetensors.torch.load_file(file), tensors())
    with safetensors.safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    content = file.read_bytes()
    assert digest == FileDigest(hashlib.sha256(content).hexdigest(), len(content))
    assert int.from_bytes(content[:8], "little") % 8 == 0


def test_read_is_the_inverse_of_write(tmp_path: Path) -> None:
    file = TensorFile(tmp_path / "file", write_tensors(tmp_path / "file", tensors()))
    assert_same({name: file.read(name) for name in file.names}, tensors())


def test_file_that_does_not_match_its_digest_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    digest = write_tensors(file, tensors())
    monkeypatch.setattr("json.loads", lambda *_: pytest.fail("read before it was checked"))
    with pytest.raises(DamagedError, match="file does not match its hash"):
        TensorFile(file, FileDigest("0" * 64, digest.size))
    with pytest.raises(DamagedError, match=f"file has {digest.size} bytes instead of 7"):
        TensorFile(file, FileDigest(digest.sha256, 7))
    with pytest.raises(DamagedError, match="absent: No such file"):
        TensorFile(tmp_path / "absent", digest)


def test_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    write_file(tmp_path / "file", [b"one"])
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "file", [b"two"])
    assert (tmp_path / "file").read_bytes() == b"one"


def test_hash_covers_the_written_bytes_even_if_memory_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may write to the shared memory at any time; the file must still match its digest."""
    shared, sha256 = torch.zeros(1000), hashlib.sha256

    class WritingHash:
        """A hash that changes the memory between hashing and writing."""

        def __init__(self) -> None:
            self.inner = sha256()

        def update(self, chunk: bytes) -> None:
            shared.add_(1)
            self.inner.update(chunk)

        def hexdigest(self) -> str:
            return self.inner.hexdigest()

    with monkeypatch.context() as patched:
        patched.setattr(hashlib, "sha256", WritingHash)
        digest = write_tensors(tmp_path / "file", {"shared": shared})
    assert shared[0] > 0
    TensorFile(tmp_path / "file", digest)
