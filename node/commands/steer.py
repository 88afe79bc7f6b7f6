"""`murmur steer`: write, sign and publish a revision of a running manifest, or list those that there are."""

import asyncio
import json
import math
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from node.commands.join.invitation import open_invitation
from node.daemon.steering.client import RunContact, contact_run
from node.paths import find_node_dirs, organiser_key_path
from node.run_dir import read_json_if_whole
from node.units import format_plural
from protocol.consensus.messages.signed import SignedMessage
from protocol.errors import MissingFileError, OrganiserError, UnreachableError, UsageError
from protocol.identity import Identity
from protocol.manifest.reading import load_manifest
from protocol.manifest.run import Manifest
from protocol.manifest.sections import DataSection
from protocol.signing import MAX_ROUND, sign
from protocol.steering import (
    MAX_REVISIONS,
    NO_REVISION,
    PAUSED_KEY,
    REVISION_KIND,
    RevisedManifest,
    Revision,
    Value,
    describe_revision,
    encode_changes,
    manifest_of_round,
    steerable_keys,
    stop_target,
)

Action = Literal["stop", "pause", "resume"]
MARGIN_ROUNDS = 2  # the open round, and one whose commit tells the run of the revision
SPREAD_HEARTBEATS = 3  # for gossip to reach all peers


@dataclass(frozen=True, kw_only=True)
class SteerOptions:
    """The command line of `murmur steer`. `None` means not given."""

    run: str
    action: Action | None = None
    changes: tuple[str, ...] = ()
    from_round: int | None = None
    key: Path | None = None
    insecure: bool = False
    json: bool = False


def steer(options: SteerOptions) -> None:
    """Publish a revision, or list the revisions if the options name no change. Raises MurmurError."""
    values = parse_assignments(options.changes)
    manifest, addresses = open_run(options.run, options.insecure)
    require_organiser_key(manifest)
    require_source_names(manifest.data, values.get("data.weights"))
    identity = load_organiser_key(options.key, manifest) if values or options.action else None
    asyncio.run(_steer(manifest, addresses, values, identity, options))


async def _steer(
    manifest: Manifest, addresses: Sequence[str], values: dict[str, Value], identity: Identity | None,
    options: SteerOptions,
) -> None:  # fmt: skip
    async with contact_run(manifest, addresses) as contact:
        if identity is None:
            _print_list(contact, options.json)
            return
        before = state_of(contact, contact.round)
        from_round = choose_round(options, contact, before)
        values |= changes_of(options.action, from_round)
        revision = sign_revision(contact, identity, from_round, values)
        reached = await contact.publish([*contact.revisions, revision])
        if not reached:
            raise UnreachableError("no peer took the revision; try again")
        _print_published(revision.body, _state_of_values(before), reached, options.json)


def parse_assignments(changes: Sequence[str]) -> dict[str, Value]:
    """Return the values of `--set KEY=VALUE` options. Raises UsageError."""
    values: dict[str, Value] = {}
    for change in changes:
        key, separator, text = change.partition("=")
        key = key.strip()
        if not separator or key not in steerable_keys() or key == PAUSED_KEY:
            known = ", ".join(name for name in steerable_keys() if name != PAUSED_KEY)
            raise UsageError(f"--set {change}: write KEY=VALUE with one of the keys {known}")
        values[key] = _parse_value(text.strip())
    if values:
        encode_changes(values)  # its errors name the key
    return values


def require_source_names(data: DataSection, weights: Value) -> None:
    """Raise UsageError if new weights do not name the sources of the run."""
    names = [source.name for source in data.sources]
    if isinstance(weights, dict) and sorted(weights) != sorted(names):
        raise UsageError(f"--set data.weights: name each source once: {', '.join(names) or 'this run has only one'}")


def _parse_value(text: str) -> Value:
    """Return a TOML value; `none` removes a target, and all else is text."""
    if text == "none":
        return None
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value if isinstance(value, bool | int | float | str | list | dict) else text


def changes_of(action: Action | None, from_round: int) -> dict[str, Value]:
    """Return the changes that an action stands for."""
    match action:
        case "stop":
            return {"target.rounds": stop_target(from_round)}
        case "pause" | "resume":
            return {PAUSED_KEY: action == "pause"}
        case None:
            return {}


def choose_round(options: SteerOptions, contact: RunContact, state: RevisedManifest) -> int:
    """Return the round from which the revision holds: the given one, or one that leaves time to spread it."""
    is_halted = state.is_paused or state.is_target_reached(contact.round, contact.tokens)
    if options.from_round is not None:
        if options.from_round > MAX_ROUND:
            raise UsageError(f"--from-round is at most {MAX_ROUND}")
        if is_halted and options.from_round > contact.round:
            raise UsageError(f"the run makes no rounds after round {contact.round}; leave --from-round out")
        return options.from_round
    if is_halted:
        return contact.round
    spread = SPREAD_HEARTBEATS * state.manifest.membership.heartbeat
    return contact.round + MARGIN_ROUNDS + (math.ceil(spread / contact.round_seconds) if contact.round_seconds else 0)


def sign_revision(
    contact: RunContact, identity: Identity, from_round: int, values: Mapping[str, Value]
) -> SignedMessage[Revision]:
    entries = contact.revisions
    if len(entries) >= MAX_REVISIONS:
        raise UsageError(f"a run has at most {MAX_REVISIONS} revisions")
    previous = entries[-1].digest if entries else NO_REVISION
    body = Revision(len(entries) + 1, previous, from_round, encode_changes(values), time.time())
    return SignedMessage.of(sign(identity, REVISION_KIND, contact.manifest.run_id, body.to_wire()), body)


def state_of(contact: RunContact, round_number: int) -> RevisedManifest:
    entries = contact.revisions
    return manifest_of_round(contact.manifest, (entry.body for entry in entries), round_number)


def _state_of_values(state: RevisedManifest) -> dict[str, Any]:
    """Return the value of every key that can be steered."""
    tables = state.manifest.model_dump(mode="json")
    keys = (key.partition(".")[::2] for key in steerable_keys() if key != PAUSED_KEY)
    return {f"{section}.{name}": tables[section][name] for section, name in keys} | {PAUSED_KEY: state.is_paused}


def _print_published(revision: Revision, before: Mapping[str, Any], reached: int, as_json: bool) -> None:
    if as_json:
        print(json.dumps(revision_row(revision) | {"peers": reached}))
        return
    changes = ", ".join(f"{key} {_show(before[key])} -> {_show(value)}" for key, value in revision.values.items())
    peers = "1 peer has" if reached == 1 else f"{reached} peers have"
    print(f"revision {revision.number}: {changes}, from round {revision.from_round}; {peers} it")


def _show(value: object) -> str:
    return "none" if value is None else json.dumps(value)


def _print_list(contact: RunContact, as_json: bool) -> None:
    entries = [entry.body for entry in contact.revisions]
    if as_json:
        sys.stdout.write(json.dumps([revision_row(entry) for entry in entries], indent=1) + "\n")
        return
    for entry in entries:
        written = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(entry.time))
        print(f"revision {describe_revision(entry)} ({written})")
    print(f"{format_plural(len(entries), 'revision')}; the run is at round {contact.round}")


def revision_row(revision: Revision) -> dict[str, Any]:
    """Return a revision for JSON."""
    return {
        "number": revision.number,
        "from_round": revision.from_round,
        "changes": dict(revision.values),
        "time": revision.time,
    }


def open_run(run: str, insecure: bool) -> tuple[Manifest, tuple[str, ...]]:
    """Return the run's manifest, and the addresses of peers to ask."""
    folder = Path(run)
    if folder.is_dir():
        nodes = find_node_dirs(folder)
        known = [address for node in nodes for address in read_json_if_whole(node / "node.json").get("addresses", ())]
        return load_manifest(nodes[0] / "run.toml"), tuple(str(address) for address in known)
    invitation = open_invitation(run, insecure)
    return invitation.manifest, (*invitation.peers, *invitation.manifest.run.bootstrap)


def require_organiser_key(manifest: Manifest) -> None:
    if not manifest.run.organiser_key:
        raise OrganiserError(
            f"nobody can steer the run {manifest.run.name}: its manifest has no run.organiser_key, which a run is "
            "given when it begins"
        )


def load_organiser_key(path: Path | None, manifest: Manifest) -> Identity:
    """Load the organiser's key. Raises MissingFileError, or OrganiserError if it is another one."""
    chosen = path or organiser_key_path()
    if not chosen.exists():
        raise MissingFileError(f"there is no key {chosen}; name the organiser's key with --key FILE")
    identity = Identity.load_or_create(chosen)
    if identity.peer_id != manifest.run.organiser_key:
        raise OrganiserError(
            f"the key {chosen} is {identity.peer_id}, but only {manifest.run.organiser_key} may steer this run; name "
            "that key with --key FILE"
        )
    return identity
