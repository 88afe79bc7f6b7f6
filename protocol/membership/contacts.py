"""Peers to try when few are live: bootstrap peers, and peers that were in the run before. No I/O but the address file.

The caller passes the time (seconds, monotonic) and the randomness. A peer that the DHT and the table have forgotten
stays here for an hour, a bootstrap peer for ever. Each is retried at growing, jittered intervals, which are short while
no peer is live.

A peer that said goodbye is not tried until it is heard of again. Only a bootstrap peer is, once a minute while no peer
is live: it may be back, and cannot call a peer behind a home router.
"""

import json
import logging
import random
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from protocol.errors import MalformedError, ManifestError
from protocol.identity import PeerId
from protocol.signing import peer_id_of

logger = logging.getLogger(__name__)

MAX_CONTACTS = 1024
MAX_ADDRESSES = 8  # per peer
MAX_FILE_BYTES = 4 * 1024 * 1024
REMEMBER_SECONDS = 3600.0
MIN_WAIT_SECONDS = 1.0
MAX_WAIT_SECONDS = 60.0
MAX_WAIT_ALONE_SECONDS = 5.0
SAVE_INTERVAL_SECONDS = 30.0
FEW_PEERS = 8  # with fewer on disk, each new one is worth an extra write


@dataclass(slots=True)
class Contact:
    """A peer that may be reachable, and the time of the next attempt."""

    peer: PeerId
    addresses: tuple[str, ...]
    last_seen: float
    is_permanent: bool = False
    has_left: bool = False  # it said goodbye
    failures: int = 0
    last_attempt: float = float("-inf")
    next_attempt: float = field(default=float("-inf"))

    def is_due(self, now: float, is_alone: bool) -> bool:
        if self.has_left:
            return self.is_permanent and is_alone and now >= self.last_attempt + MAX_WAIT_SECONDS
        return self.next_attempt <= now or (is_alone and now >= self.last_attempt + MAX_WAIT_ALONE_SECONDS)


class Contacts:
    """The contacts of a directory and their retry times."""

    def __init__(self, bootstrap: Iterable[str], rng: random.Random, max_contacts: int = MAX_CONTACTS) -> None:
        self._rng = rng
        self._max_contacts = max_contacts
        self._contacts: dict[PeerId, Contact] = {}  # the longest unseen first
        self._bootstrap = _group_by_peer(bootstrap)
        self.protected: frozenset[PeerId] = frozenset()  # peers that no newcomer displaces
        for peer, addresses in self._bootstrap.items():
            self._contacts[peer] = Contact(peer, addresses, last_seen=float("inf"), is_permanent=True)

    def __len__(self) -> int:
        return len(self._contacts)

    def add(self, peer: PeerId, addresses: Sequence[str], now: float) -> None:
        """Record a peer's addresses.

        News of a peer do not shorten the wait after a failure.
        """
        contact = self._contacts.pop(peer, None) or Contact(peer, (), now)
        if not set(addresses) <= set(contact.addresses):
            contact.has_left = False  # it is back elsewhere
        # The manifest's addresses stay, because a record may list others that are gone when they are needed.
        known = dict.fromkeys((*self._bootstrap.get(peer, ()), *addresses))
        contact.addresses = tuple(known)[:MAX_ADDRESSES]
        if not contact.is_permanent:
            contact.last_seen = now
        self._contacts[peer] = contact
        self._prune(now)

    def record_news(self, peer: PeerId, addresses: Sequence[str], now: float, has_left: bool) -> None:
        """Record the addresses in a peer's newest record, and whether it says goodbye there."""
        self.add(peer, addresses, now)
        contact = self._contacts.get(peer)
        if contact is None:
            return
        if has_left and not contact.has_left:
            contact.last_attempt = now
        contact.has_left = has_left

    def pick_due(
        self,
        now: float,
        live_peers: Container[PeerId],
        count: int,
        is_alone: bool = False,
        among: Container[PeerId] | None = None,
    ) -> list[Contact]:
        """Return up to `count` random contacts that are due and not live.

        `is_alone` means that no peer is live; `among` limits the choice.
        """
        self._prune(now)
        waiting = [
            contact
            for peer, contact in self._contacts.items()
            if peer not in live_peers
            and (among is None or peer in among)
            and contact.addresses
            and contact.is_due(now, is_alone)
        ]
        return self._rng.sample(waiting, min(count, len(waiting)))

    def record_success(self, peer: PeerId, now: float) -> None:
        contact = self._contacts.get(peer)
        if contact is not None:
            contact.failures, contact.next_attempt = 0, now

    def record_failure(self, peer: PeerId, now: float) -> float:
        """Return the seconds until the next attempt."""
        contact = self._contacts.get(peer)
        if contact is None:
            return MAX_WAIT_SECONDS
        # The exponent is bounded, because 2.0 ** failures overflows after a week of attempts.
        wait = min(MIN_WAIT_SECONDS * 2.0 ** min(contact.failures, 16), MAX_WAIT_SECONDS) * self._rng.uniform(0.7, 1.3)
        contact.failures += 1
        contact.last_attempt, contact.next_attempt = now, now + wait
        return wait

    def should_warn(self, peer: PeerId) -> bool:
        """Return whether to log this failure as a warning.

        That is the case for bootstrap peers that did not say goodbye, at the 1st, 2nd, 4th, 8th, ... failure in a row.
        Other contacts were live once, and the directory reported that they are gone.
        """
        contact = self._contacts.get(peer)
        if contact is None or not contact.is_permanent or contact.has_left:
            return False
        return contact.failures & (contact.failures - 1) == 0

    def addresses(self) -> Mapping[PeerId, tuple[str, ...]]:
        return {peer: contact.addresses for peer, contact in self._contacts.items()}

    def is_permanent(self, peer: PeerId) -> bool:
        """Return whether the user or the manifest named this peer."""
        return peer in self._bootstrap

    def bootstrap(self) -> Mapping[PeerId, tuple[str, ...]]:
        """Return the bootstrap peers that did not say goodbye."""
        return {peer: listed for peer, listed in self._bootstrap.items() if not self._contacts[peer].has_left}

    def _prune(self, now: float) -> None:
        for peer, contact in list(self._contacts.items()):
            is_full = len(self._contacts) > self._max_contacts
            is_kept = contact.is_permanent or (is_full and peer in self.protected)
            if not is_kept and (is_full or now - contact.last_seen > REMEMBER_SECONDS):
                del self._contacts[peer]


class AddressFile:
    """Keeps peers' addresses over restarts, or does nothing without a path.

    Times are in seconds, monotonic.
    """

    def __init__(self, path: Path | None, now: float) -> None:
        self._path = path
        self._saved_at = now
        self._saved: frozenset[PeerId] = frozenset()

    def load(self) -> Mapping[PeerId, tuple[str, ...]]:
        """Return the addresses that an earlier process saved."""
        return {} if self._path is None else load_addresses(self._path)

    def save_if_due(self, addresses: Mapping[PeerId, Sequence[str]], now: float) -> None:
        """Save from time to time, but a new contact at once while few are saved.

        A node that knows few peers and is killed has nobody else to ask when it comes back.
        """
        is_new = len(self._saved) < FEW_PEERS and not self._saved.issuperset(addresses)
        if is_new or now - self._saved_at > SAVE_INTERVAL_SECONDS:
            self.save(addresses, now)

    def save(self, addresses: Mapping[PeerId, Sequence[str]], now: float) -> None:
        self._saved_at = now
        self._saved = frozenset(addresses)
        if self._path is not None:
            save_addresses(self._path, addresses)


def save_addresses(path: Path, addresses: Mapping[PeerId, Sequence[str]]) -> None:
    """Write the addresses for `load_addresses` atomically; only log a failure."""
    text = json.dumps([address for listed in addresses.values() for address in listed], indent=0)
    temporary = path.with_suffix(".new")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        logger.warning("cannot save the addresses of peers in %s: %s", path, error)


def load_addresses(path: Path) -> Mapping[PeerId, tuple[str, ...]]:
    """Return the saved addresses by peer, or none if the file is unusable.

    An unusable file is logged; a missing one is not.
    """
    try:
        with path.open("rb") as file:
            listed = json.loads(file.read(MAX_FILE_BYTES))
        if not (isinstance(listed, list) and all(isinstance(address, str) for address in listed)):
            raise ValueError("not a list of addresses")
        return _group_by_peer(listed)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, ManifestError) as error:
        logger.warning("cannot use the addresses in %s (%s); peers will be searched for again", path, error)
        return {}


def _group_by_peer(addresses: Iterable[str]) -> dict[PeerId, tuple[str, ...]]:
    grouped: dict[PeerId, tuple[str, ...]] = {}
    for address in addresses:
        try:
            peer = peer_id_of(address)
        except MalformedError as error:
            raise ManifestError(f"bootstrap address {error}; add it") from error
        grouped[peer] = (*grouped.get(peer, ()), address)
    return grouped
