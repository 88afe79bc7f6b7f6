import pytest

from node.quantities import parse_size
from protocol.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GB", 4_000_000_000), ("512MB", 512_000_000), ("2GiB", 2 << 30), ("1.5 MB", 1_500_000), ("7", 7), ("3k", 3000)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--memory") == size


@pytest.mark.parametrize("text", ["", "GB", "4 apples", "-1GB", "1e9", "0", "0.1", "4GBs", "9" * 40])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="--memory: .*; write it like 4GB"):
        parse_size(text, "--memory")
