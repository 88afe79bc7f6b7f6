"""Find the folder that `model.from` names: on this machine, or on the Hugging Face hub if the user allows it."""

import os
import re
from pathlib import Path
from typing import Final

from protocol.errors import DataError, UnreachableError, UsageError
from protocol.fault_words import shorten

HUB_SCHEME: Final = "hf:"
HUB_NAME: Final = re.compile(r"hf:(?P<name>\w[\w.-]{0,95}(/\w[\w.-]{0,95})?)@(?P<revision>\w[\w./-]{0,95})", re.ASCII)
ALLOWED: Final = "MURMUR_ALLOW_HUB"
FILES: Final = ["config.json", "*.safetensors", "model.safetensors.index.json"]


def weights_folder(source: str, base: Path) -> Path:
    """Return the folder with the weights; a relative path starts at `base`.

    Raises:
        UsageError: the name is not complete, or the user has not allowed the hub.
        DataError: the package that downloads from the hub is not installed.
        UnreachableError: the hub does not answer, or does not have it.
    """
    if not source.startswith(HUB_SCHEME):
        return base / Path(source).expanduser()
    found = HUB_NAME.fullmatch(source)
    if not found:
        raise UsageError(f"model.from = {shorten(source)} is not hf:NAME@REVISION; name a revision, such as a commit")
    return _download(found["name"], found["revision"])


def _download(name: str, revision: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError as error:
        raise DataError('weights of the hub need a package; run `pip install "murmuration[hf]"`') from error
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        if os.environ.get(ALLOWED) != "1":
            raise UsageError(
                f"the weights {name} are not in this machine's cache; set {ALLOWED}=1 to download them from the "
                "Hugging Face hub, or name a folder in model.from"
            ) from None
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=FILES))
    except (OSError, ValueError) as error:  # no network, no such model or revision; all errors of the hub are these
        reason = shorten(str(error).splitlines()[0] if str(error) else type(error).__name__, 150)
        raise UnreachableError(
            f"cannot download {name}@{revision} from the Hugging Face hub: {reason}; check the name and the network, "
            "or name a folder in model.from"
        ) from error
