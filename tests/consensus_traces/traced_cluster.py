"""A cluster of round machines that is driven by commands and writes down what each machine does.

Peers have letters: A leads view 0, B leads the next view if A fails, and so on. Messages arrive at once and in order
unless a command loses them. A line that repeats an earlier one is a retransmission and only counted.

    cluster 3 gather [parts=1]         start so many machines in round 0, with that topology
    contribute A B                     give each of these peers a contribution of its own trainer
    elapse 1.6                         let the time pass, in seconds
    lose commit [from=B] [to=A]        lose these messages from now on
    stall A                            let no download of a blob of A's finish from now on
    heal                               lose and stall nothing any more
    kill A                             stop a peer, and let the others learn of it
    freeze A                           stop a peer; the others do not learn of it
    restart A                          start a stopped peer again, with the vote record on its disk
    equivocate A to=B                  let A send a second, different contribution to B
    state                              print the view, the leader and the commit of each peer
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from protocol.blobs.blob import Blob
from protocol.conduct import Proof
from protocol.consensus.events import (
    Action,
    BlobAvailable,
    Event,
    Fetch,
    Finish,
    MessageReceived,
    Reduce,
    Rejected,
    RequestEarlySubmit,
    Send,
    Speculate,
    VoteRecord,
)
from protocol.consensus.machine import RoundMachine
from protocol.consensus.messages.contributions import NO_ROSTER, Commit, Contribution, Roster
from protocol.consensus.messages.kinds import (
    Acknowledgement,
    Body,
    CommitCertificate,
    Inventory,
    Justification,
    Promise,
    ReducedPart,
    ReducerAssignment,
)
from protocol.consensus.messages.signed import Digest, SignedMessage
from protocol.consensus.quorum import Election
from protocol.consensus.settings import RoundStart
from protocol.identity import PeerId
from tests.protocol.consensus.cluster import BASE, Cluster
from tests.simulation.virtual.network import NAMES, make_contribution, make_signer

WIRE_KINDS = {"inventory": "holding", "assignment": "inclusion", "reduced-part": "part", "certificate": "decision"}


class TracedCluster(Cluster):
    """A cluster that writes a trace; `lines` are those of the command that runs, `letters` the names of the peers."""

    def __init__(self, peers: int, topology: str, parts: int = 1) -> None:
        self.lines: list[str] = []
        self.letters = dict(zip(leaders_in_order(NAMES[:peers]), "ABCDEFGHIJKLMNOP", strict=False))
        self.by_letter = {letter: peer for peer, letter in self.letters.items()}
        self._known_lines: set[str] = set()
        self._retransmissions = 0
        self._blob_names: dict[Digest, str] = {}
        self._proposals: dict[Digest, str] = {}
        self._votes: dict[PeerId, VoteRecord] = {}
        super().__init__(peers, topology, parts)
        for peer, letter in self.letters.items():
            for part, blob in enumerate(make_contribution(peer, 0, BASE, self.scenario).parts):
                self._blob_names[blob.digest] = f"{letter}/{part}" if parts > 1 else letter

    def run(self, words: list[str], options: dict[str, str]) -> str:
        """Carry out one command and return its trace."""
        self.lines, self._retransmissions = [], 0
        self._carry_out(words[0], words[1:], options)
        if self._retransmissions:
            self.lines.append(f"(repeated lines: {self._retransmissions})")
        return "\n".join(self.lines)

    def _carry_out(self, word: str, arguments: list[str], options: dict[str, str]) -> None:
        peers = [self.by_letter[letter] for letter in arguments if letter in self.by_letter]
        match word:
            case "contribute":
                self.contribute(*peers)
            case "elapse":
                self.elapse(float(arguments[0]))
            case "lose":
                self._lose(WIRE_KINDS.get(arguments[0], arguments[0]), options)
            case "stall":
                stalled = {blob.digest for peer in peers for blob in self.blobs_of_contribution(peer)}
                self.is_slow = lambda peer, digest: digest in stalled
            case "heal":
                self.drop = lambda sender, receiver, kind: False
                self.is_slow = lambda peer, digest: False
                self.deliver_all()
            case "kill" | "freeze":
                self.kill(*peers, noticed=word == "kill")
            case "restart":
                self._restart(peers[0])
            case "equivocate":
                self._equivocate(peers[0], self.by_letter[options["to"]])
            case "state":
                self.lines += [self._state_of(peer) for peer in self.letters]
            case _:
                raise ValueError(f"no such command: {word}")

    def _lose(self, kind: str, options: dict[str, str]) -> None:
        sent_by, sent_to = (self.by_letter.get(options.get(key, "")) for key in ("from", "to"))

        def drop(sender: PeerId, receiver: PeerId, its_kind: str) -> bool:
            is_lost = its_kind == kind and sent_by in (None, sender) and sent_to in (None, receiver)
            if is_lost:
                self._write(f"{self.letters[sender]} -> {self.letters[receiver]} lost: {name_of_kind(kind)}")
            return is_lost

        self.drop = drop

    def _restart(self, peer: PeerId) -> None:
        self.dead.discard(peer)
        seen = dict.fromkeys(self.letters, self.now)
        vote = self._votes.get(peer)
        start = RoundStart(0, BASE, seen, vote)
        self.machines[peer] = RoundMachine(self.scenario.settings(), peer, start, make_signer(peer), self.now)
        self.stores[peer] = {blob.digest for blob in vote.required_blobs} if vote else set()
        self.set_live(*(name for name in self.letters if name not in self.dead))

    def _equivocate(self, sender: PeerId, receiver: PeerId) -> None:
        body = replace(make_contribution(sender, 0, BASE, self.scenario), steps=11)
        message = SignedMessage.of(make_signer(sender)("contribution", body.to_wire()), body)
        self._write(f"{self.letters[sender]} -> {self.letters[receiver]}: another contribution")
        self.feed_event(receiver, MessageReceived(message))
        self.deliver_all()

    def _state_of(self, peer: PeerId) -> str:
        letter, machine = self.letters[peer], self.machines[peer]
        if peer in self.dead:
            return f"{letter}: stopped"
        commit = self.describe(machine.commit) if machine.commit else "undecided"
        return f"{letter}: view {machine.view}, leader {self.letters.get(machine.leader or '', 'none')}, {commit}"

    def feed_event(self, name: PeerId, event: Event) -> None:
        """Write down the blobs that arrive, and hand the event on."""
        if name not in self.dead and isinstance(event, BlobAvailable):
            self._write(f"{self.letters[name]} holds {self._blob(event.part_blob.blob)}")
        super().feed_event(name, event)

    def _act(self, name: PeerId, action: Action) -> None:
        if isinstance(action, VoteRecord):
            self._votes[name] = action
        if isinstance(action, Reduce):
            sum_of_part = f"sum {action.part} of {self._senders(action.contributions)}"
            self._blob_names[self.reduce_part(name, action).digest] = f"[{sum_of_part}]"
        self._write(f"{self.letters[name]} {self._describe_action(action)}")
        super()._act(name, action)
        if isinstance(action, Fetch) and action.part_blob.blob.digest in self.stores[name]:
            # An earlier process left the blob on disk.
            del self.pending_fetches[name, action.part_blob]
            self.feed_event(name, BlobAvailable(action.part_blob))

    def _write(self, text: str) -> None:
        if text in self._known_lines:
            self._retransmissions += 1
        else:
            self._known_lines.add(text)
            self.lines.append(f"{self.now:4.1f}  {text}")

    def _describe_action(self, action: Action) -> str:
        match action:
            case VoteRecord(view=view, lock=lock):
                return f"persists its vote: view {view}" + (f", lock on {self.describe(lock)}" if lock else "")
            case Send(peers, signed):
                return f"-> {self._names(peers)}: {self.describe(self.network.open(signed))}"
            case Fetch(part_blob, sources):
                return f"fetches {self._blob(part_blob.blob)} from {self._names(sources) or 'nobody'}"
            case Reduce(part, _, contributions):
                return f"reduces part {part} of {self._senders(contributions)}"
            case Finish(commit):
                return f"finishes with {self.describe(commit)}"
            case Rejected(peer, reason):
                return f"rejects {self.letters[peer] if peer else 'nobody'}: {reason}"
            case Speculate(commit):
                return f"speculates on {self._senders(commit.contributions)}"
            case RequestEarlySubmit():
                return "asks its trainer for an early contribution"

    def describe(self, message: SignedMessage[Body]) -> str:
        """Return a message in words."""
        body = message.body
        match body:
            case Contribution():
                return "contribution"
            case Roster():
                return f"roster of view {body.view}: {self._senders(body.contributions)}"
            case Inventory():
                where = f"inventory in view {body.view}" + (", no roster" if body.roster == NO_ROSTER else "")
                held = " ".join(sorted(self._blob_names.get(digest, "?") for digest in body.blobs)) or "nothing"
                return f"{where}: {held}" + (f", locked on {self._proposals[body.lock]}" if body.lock else "")
            case ReducerAssignment():
                reducers = " ".join(self.letters[peer] for peer in body.reducers)
                return f"assignment {body.attempt}: sum {self._names(body.included)}, reducers by part {reducers}"
            case ReducedPart():
                return f"reduced part {body.part}: {self._blob(body.blob)}"
            case Commit():
                left_out = f" without {self._names(body.left_out)}" if body.left_out else ""
                text = f"commit of {self.letters[message.sender]} in view {body.view}"
                self._proposals[message.digest] = text
                return f"{text}: {self._senders(body.contributions)}{left_out}"
            case Acknowledgement(confirms=True):
                return f"confirmation of the {self._proposals[body.proposal]}"
            case Promise():
                acknowledged = body.bounds.acknowledged
                bound = f", locked on {self._proposals[acknowledged.proposal]}" if acknowledged else ""
                return f"promise to view {body.view}{bound}"
            case Justification():
                return f"promises of {self._senders(body.promises)} for view {body.view}"
            case CommitCertificate(confirms=True):
                return f"decision of {self._senders(body.acknowledgements)} for the {self._proposals[body.proposal]}"
            case Acknowledgement():
                return f"acknowledgement of the {self._proposals[body.proposal]}"
            case CommitCertificate():
                return f"certificate of {self._senders(body.acknowledgements)} for the {self._proposals[body.proposal]}"
            case Proof():
                return f"proof: {self.letters[body.culprit]} signed {body.describe()}"

    def _senders(self, messages: Iterable[SignedMessage[Any]]) -> str:
        return self._names(message.sender for message in messages)

    def _names(self, peers: Iterable[PeerId]) -> str:
        return " ".join(sorted(self.letters[peer] for peer in peers))

    def _blob(self, blob: Blob) -> str:
        return self._blob_names.get(blob.digest, "?")


def leaders_in_order(peers: Iterable[PeerId]) -> list[PeerId]:
    """Return the peers in the order in which they lead, each in the view after the one before it failed."""
    election, left, order = Election(BASE), frozenset(peers), list[PeerId]()
    while leader := election.leader(len(order), left):
        order.append(leader)
        left -= {leader}
    return order


def name_of_kind(wire_kind: str) -> str:
    """Return the name of a kind of message that stands in the traces."""
    return next((name for name, kind in WIRE_KINDS.items() if kind == wire_kind), wire_kind)
