"""Send an exported model to a repository of the Hugging Face Hub: one commit with all files, and the tag `round-N`.

The package huggingface-hub makes the calls. It reads the token from HF_TOKEN or from `hf auth login`, and the address
of the server from HF_ENDPOINT. A host sends the final model of its run by `murmur export --push` in a process of its
own, so that its page stays fast and the memory is freed.
"""

import importlib.util
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from node.paths import find_newest_model
from node.processes.workers import ChildResult, run_module
from protocol.errors import UnreachableError, UsageError
from protocol.manifest.sections import is_hub_name
from protocol.tasks import run_periodically

logger = logging.getLogger(__name__)

REFUSALS = (401, 403)
MAX_SHOWN = 200
POLL_SECONDS = 5.0
RETRY_SECONDS = 600.0
MIN_PUSH_SECONDS = 300.0  # the longest that an export and its upload may take, plus the bytes at this speed:
MIN_BYTES_PER_SECOND = 250_000


@dataclass(frozen=True)
class HubRepository:
    """A repository of models, `ORG/NAME`; it exists once something was pushed."""

    name: str

    @classmethod
    def open(cls, name: str, option: str) -> "HubRepository":
        """Check everything that needs no network. Raises UsageError, which names the option or the key."""
        if not is_hub_name(name):
            raise UsageError(f"{option}: {name[:MAX_SHOWN]!r} is not a repository; write it like ORG/NAME")
        if importlib.util.find_spec("huggingface_hub") is None:
            raise UsageError(f"{option} needs the package huggingface-hub: pip install 'murmuration[hub]'")
        from huggingface_hub import get_token

        if not get_token():
            raise UsageError(f"{option} needs a token of the Hub: set HF_TOKEN, or run `hf auth login`")
        return cls(name)

    def push(self, folder: Path, round_number: int, private: bool = False) -> str:
        """Send all files of a folder, tag them `round-N`, and return the address of the tag.

        A repository that does not exist is created, visible to all unless `private`; an existing one stays as it is.
        Files that have not changed are not sent again. Raises UsageError, or UnreachableError if the Hub does not
        answer or fails.
        """
        from huggingface_hub import HfApi, constants
        from huggingface_hub.utils.tqdm import disable_progress_bars

        if not sys.stderr.isatty():
            disable_progress_bars()
        api, tag, message = HfApi(), f"round-{round_number}", f"The model of round {round_number}"
        with _one_line_errors(self.name, constants.ENDPOINT):
            api.create_repo(self.name, private=private or None, exist_ok=True)
            sent = api.upload_folder(repo_id=self.name, folder_path=folder, commit_message=message)
            api.create_tag(self.name, tag=tag, revision=sent.oid, tag_message=message, exist_ok=True)
        return f"{constants.ENDPOINT}/{self.name}/tree/{tag}"


@contextmanager
def _one_line_errors(name: str, endpoint: str) -> Iterator[None]:
    """Replace what the package raises by one line that says what to do."""
    from httpx2 import HTTPError
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in REFUSALS:
            raise UsageError(
                f"{endpoint} refuses the token ({status}): it needs the right to write to {name}; "
                f"{endpoint}/settings/tokens makes one"
            ) from error
        said = " ".join(str(error.server_message or "").split())[:MAX_SHOWN]
        raise UnreachableError(
            f"{endpoint} answers {status} for {name}{f' ({said})' if said else ''}; nothing is lost, try again later"
        ) from error
    except (RuntimeError, ValueError) as error:  # of the package, about one file
        reason = " ".join(f"{error} {error.__cause__ or ''}".split())[:MAX_SHOWN]
        raise UnreachableError(f"{endpoint} did not take the model: {reason}; try again later") from error
    except (HTTPError, OSError) as error:
        raise UnreachableError(
            f"{endpoint} does not answer ({type(error).__name__}); check the connection, and HF_ENDPOINT if it is set"
        ) from error


class HubUploader:
    """Pushes the final model once; it tries again while the Hub does not take it.

    Args:
        folders: of the nodes on this machine, whose newest model is sent.
        repository: ORG/NAME.
        size: bytes of the weights.
        is_final: returns whether a round is the run's last.
    """

    def __init__(self, folders: Sequence[Path], repository: str, size: int, is_final: Callable[[int], bool]) -> None:
        self._folders = tuple(folders)
        self._repository = repository
        self._seconds = MIN_PUSH_SECONDS + size / MIN_BYTES_PER_SECOND
        self._is_final = is_final
        self._sent_round: int | None = None
        self._not_before = 0.0
        self._failure = ""

    async def run(self) -> None:
        """Push until cancelled: again if the organiser extends the run and it ends once more."""
        await run_periodically(POLL_SECONDS, self._look)

    async def _look(self) -> None:
        await self.push_if_final(time.monotonic())

    async def push_if_final(self, now: float) -> None:
        """Push the newest model if it is the final one, unless that was done or has just failed."""
        newest = find_newest_model(self._folders)
        if newest is None or newest[0] == self._sent_round or now < self._not_before or not self._is_final(newest[0]):
            return
        failure = await self._push(newest[1])
        if not failure:
            self._sent_round = newest[0]
            return
        self._not_before = now + RETRY_SECONDS
        if failure != self._failure:
            logger.warning("the model was not sent to %s, and will be in ten minutes: %s", self._repository, failure)
        self._failure = failure

    async def _push(self, folder: Path) -> str:
        """Return why the model of a node was not sent; empty if it was."""
        try:
            child = await run_module("node.cli", ["export", str(folder), "--push", self._repository], self._seconds)
        except TimeoutError:
            return f"it took longer than {self._seconds:.0f} s"
        except OSError as error:
            return f"the process cannot be started: {error.strerror}"
        return _failure_of(child)


def _failure_of(child: ChildResult) -> str:
    if child.exit_code:
        return child.last_error.removeprefix("murmur: ") or f"the process ended with exit code {child.exit_code}"
    logger.info("%s", child.output.decode(errors="replace").strip().rpartition("\n")[2])
    return ""
