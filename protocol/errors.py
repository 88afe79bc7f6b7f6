"""The tree of errors a person or a peer can cause, and the exit code of each.

MurmurError                      1   anything below, unspecified
├── UsageError                   2   a command was called wrongly
├── ManifestError                3   unknown or ill-typed key, unreadable manifest, no such recipe
├── MissingFileError             4   a file or folder that was named does not exist
├── IdentityError                5   key file unreadable or readable by others
├── AlreadyRunningError          6   another node uses this folder
├── OtherRunError                7   the folder belongs to another run
├── CheckpointError              8   no usable checkpoint, or one of other shapes
├── StorageError                 9   no space on disk, or the disk fails
├── UnreachableError            10   no bootstrap peer answers (only where a command gives up)
│   └── GoneError                    what a peer named is not there any more
├── DeviceError                 11   the accelerator asked for is not there
├── DataError                   12   the training text is missing or malformed
├── TransportError              13   p2pd cannot be started or kept alive
│   └── PortTakenError               a port that was asked for is another program's
├── OrganiserError              14   a manifest from elsewhere that its organiser has not signed
└── PeerFault                    -   a peer sent something wrong; never leaves the daemon
    ├── MalformedError               bytes that do not parse, or parse to nonsense
    ├── ForgedError                  a signature that does not verify
    ├── StaleError                   expired, replayed or of another run
    └── LimitError                   more than this identity may send
"""


def describe_error(error: BaseException) -> str:
    """What it says of itself; many of Python's own say nothing."""
    return str(error) or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)


class MurmurError(Exception):
    """An error whose text is one line that says what to do."""

    exit_code = 1


class UsageError(MurmurError):
    exit_code = 2


class ManifestError(MurmurError):
    exit_code = 3


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


class PeerFault(MurmurError):  # noqa: N818
    """What a peer did wrong; caught, counted and logged where its bytes enter."""

    @property
    def metric_label(self) -> str:
        """By which it is counted: malformed, forged, stale, limit."""
        return type(self).__name__.removesuffix("Error").lower()


class MalformedError(PeerFault):
    pass


class ForgedError(PeerFault):
    pass


class StaleError(PeerFault):
    pass


class LimitError(PeerFault):
    pass
