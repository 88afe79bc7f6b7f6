"""Issue receipts to visitors of the host's page: one at a time in a thread, and the newest ones from memory."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from node.daemon.receipts.commit_log import CommitLog
from node.daemon.receipts.ledger import commit_reader, read_ledger
from node.daemon.receipts.receipt import Receipt, issue_receipt
from protocol.identity import Identity, PeerId

MAX_KEPT_RECEIPTS = 32


class ReceiptIssuer:
    """Issues receipts from a commit log; `name_of` returns the name of a peer, or an empty text."""

    def __init__(self, commit_log: CommitLog, run: str, identity: Identity, name_of: Callable[[PeerId], str]) -> None:
        self._commit_log = commit_log
        self._run = run
        self._identity = identity
        self._name_of = name_of
        self._lock = asyncio.Lock()
        self._kept: OrderedDict[tuple[PeerId, bytes], Receipt] = OrderedDict()

    @property
    def path(self) -> Path:
        """Return the file of the commits that the receipts are checked against."""
        return self._commit_log.path

    def overview(self) -> dict[str, Any]:
        """Return the counted tokens and rounds of all peers, as JSON values."""
        ledger = self._commit_log.ledger
        accounts = sorted(ledger.accounts.items(), key=lambda item: (-item[1].tokens, item[0]))
        return {
            "run": self._run,
            "run_id": ledger.header.run_id,
            "rounds": ledger.head.round,
            "tokens": ledger.head.tokens,
            "missing_rounds": ledger.missing_rounds,
            "missing_tokens": ledger.missing_tokens,
            "chain_digest": ledger.head.digest.hex(),
            "issuer": self._identity.peer_id,
            "peers": [
                {"peer": peer, "name": self._name_of(peer), "tokens": account.tokens, "rounds": account.rounds}
                for peer, account in accounts
            ],
        }

    async def issue(self, peer: PeerId) -> Receipt | None:
        """Return the receipt of a peer at the newest round; `None` if no commit counts work of it."""
        if peer not in self._commit_log.ledger.accounts:
            return None
        async with self._lock:
            head = self._commit_log.head
            kept = self._kept.get((peer, head.digest))
            if kept is None:
                kept = await asyncio.to_thread(self._build, peer, head.round)
                self._kept[peer, head.digest] = kept
                while len(self._kept) > MAX_KEPT_RECEIPTS:
                    self._kept.popitem(last=False)
            return kept

    def _build(self, peer: PeerId, round_number: int) -> Receipt:
        ledger = read_ledger(self.path, commit_reader, {peer}, up_to_round=round_number)
        return issue_receipt(ledger, self._run, peer, self._name_of(peer), self._identity)
