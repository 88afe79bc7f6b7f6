import pytest

from protocol.errors import StorageError, describe_error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (StorageError("the disk is full"), "the disk is full"),
        (TimeoutError(), "no answer in time"),
        (ConnectionResetError(), "ConnectionResetError"),
    ],
)
def test_every_error_has_a_text(error: Exception, text: str) -> None:
    assert describe_error(error) == text
