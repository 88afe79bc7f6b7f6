import pytest

from protocol.errors import StorageError, describe_error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (StorageError("the disk is full"), "the disk is full"),
        (TimeoutError(), "no answer in time"),
        (ConnectionResetError(), "ConnectionResetError"),
    ],
)
def test_no_error_says_nothing(error: Exception, words: str) -> None:
    assert describe_error(error) == words
