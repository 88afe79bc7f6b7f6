"""The errors that a person or a peer can cause, and the exit code of each.

MurmurError                      1   any of the errors below, unspecified
├── UsageError                   2   a command was called with wrong arguments
├── ManifestError                3   unknown or ill-typed key, unreadable manifest, unknown recipe
├── MissingFileError             4   a named file or folder does not exist
├── IdentityError                5   the key file is unreadable, or readable by others
├── AlreadyRunningError          6   another node uses this folder
├── OtherRunError                7   the folder belongs to another run
├── CheckpointError              8   no usable checkpoint, or one with other shapes
├── StorageError                 9   no space on disk, or the disk fails
├── UnreachableError            10   no bootstrap peer answers (only if a command gives up)
│   └── GoneError                    a blob or peer that another peer named no longer exists
│       └── DeniedError              a peer that has to have a blob says that it lacks it
├── DeviceError                 11   the requested accelerator is not available
├── DataError                   12   the training text is missing or malformed
├── TransportError              13   p2pd cannot be started or kept alive
│   └── PortTakenError               another program uses a requested port
├── OrganiserError              14   the organiser's signature of a manifest is missing or wrong
├── ReceiptError                15   a receipt or the commits behind it do not verify
├── KeyInUseError               16   a node that started earlier uses the same key
├── AdmissionError              17   the run does not admit this node's key
├── ComponentError              18   a module of the run's own is missing here, has other content, or cannot be used
└── PeerFault                    -   a peer sent something wrong; never leaves the daemon
    ├── MalformedError               bytes that do not parse, or parse to invalid values
    ├── ForgedError                  a signature that does not verify
    ├── StaleError                   expired, replayed or of another run
    ├── LimitError                   more than this peer may send
    ├── ContradictedError            a signed result that other servers contradict
    └── NewcomerError                one more unknown key than may be learned now
"""

from collections.abc import Sequence
from typing import TypeVar

Reply = TypeVar("Reply")


def describe_error(error: BaseException) -> str:
    """Return the text of an error, or the name of its type if it has none.

    Many of Python's own errors have no text.
    """
    return str(error) or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)


class MurmurError(Exception):
    """An error whose text is one line that tells the user what to do."""

    exit_code = 1


class UsageError(MurmurError):
    exit_code = 2


class ManifestError(MurmurError):
    """A fault of a manifest; `keys` is the path of the key that must change, if one is known."""

    exit_code = 3

    def __init__(self, text: str, keys: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.keys = tuple(keys)


class MissingFileError(MurmurError):
    exit_code = 4


class IdentityError(MurmurError):
    exit_code = 5


class AlreadyRunningError(MurmurError):
    exit_code = 6


class OtherRunError(MurmurError):
    exit_code = 7


class CheckpointError(MurmurError):
    exit_code = 8


class StorageError(MurmurError):
    exit_code = 9


class UnreachableError(MurmurError):
    exit_code = 10


class GoneError(UnreachableError):
    pass


class DeniedError(GoneError):
    """`peer` says that it lacks a blob that it has named as its own."""

    def __init__(self, text: str, peer: str) -> None:
        super().__init__(text)
        self.peer = peer


class DeviceError(MurmurError):
    exit_code = 11


class DataError(MurmurError):
    exit_code = 12


class TransportError(MurmurError):
    exit_code = 13


class PortTakenError(TransportError):
    pass


class OrganiserError(MurmurError):
    exit_code = 14


class ReceiptError(MurmurError):
    exit_code = 15


class KeyInUseError(MurmurError):
    exit_code = 16


class AdmissionError(MurmurError):
    exit_code = 17


class ComponentError(MurmurError):
    exit_code = 18


class PeerFault(MurmurError):  # noqa: N818
    """A peer's violation of the protocol.

    It is caught, counted and logged where the peer's bytes arrive.
    """

    @property
    def metric_label(self) -> str:
        """Return the label under which it is counted: malformed, forged, stale, limit, contradicted or newcomer."""
        return type(self).__name__.removesuffix("Error").lower()


class MalformedError(PeerFault):
    pass


class ForgedError(PeerFault):
    pass


class StaleError(PeerFault):
    pass


class LimitError(PeerFault):
    pass


class ContradictedError(PeerFault):
    pass


def error_with_code(exit_code: int, text: str) -> MurmurError:
    """Return the error with this exit code, for one that another process reports."""
    kinds = [kind for kind in globals().values() if isinstance(kind, type) and issubclass(kind, MurmurError)]
    return next((kind for kind in kinds if kind.exit_code == exit_code), MurmurError)(text)


class NewcomerError(PeerFault):
    pass


def require_reply(reply: Reply | None) -> Reply:
    """Return a peer's reply. Raises MalformedError if it did not parse: RPC clients return such a reply as None."""
    if reply is None:
        raise MalformedError("an answer that does not parse")
    return reply
