"""The base of every table of the manifest, and the types of values that several tables have."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from protocol.errors import MalformedError
from protocol.identity import public_key

NAME_PATTERN = r"[a-z0-9][a-z0-9._-]{0,63}"
Name = Annotated[str, StringConstraints(pattern=f"^{NAME_PATTERN}$")]


class Section(BaseModel):
    """Base of every table: it refuses unknown keys, is immutable, and guesses no type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _check_peer_ids(keys: tuple[str, ...]) -> tuple[str, ...]:
    for key in keys:
        check_peer_id(key, "write peer ids, of 52 characters that begin with 12D3KooW")
    if len(set(keys)) < len(keys):
        raise ValueError("name each peer id once")
    return keys


def check_peer_id(key: str, advice: str) -> None:
    """Raise ValueError with this advice unless a text is a peer id."""
    try:
        public_key(key)
    except MalformedError as error:
        raise ValueError(advice) from error


PeerIds = Annotated[tuple[str, ...], Field(max_length=1024), AfterValidator(_check_peer_ids)]
