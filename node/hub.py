"""Send an exported model to a repository of the Hugging Face Hub: one commit with all files, and the tag `round-N`.

The package huggingface-hub makes the calls. It reads the token from HF_TOKEN or from `hf auth login`, and the address
of the server from HF_ENDPOINT.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import UnreachableError, UsageError
from protocol.manifest.sections import is_hub_name

REFUSALS = (401, 403)
MAX_SHOWN = 200


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
        from huggingface_hub.utils import disable_progress_bars

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
