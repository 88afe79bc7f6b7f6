"""Updates of records: the fields that changed since a version that the receiver holds.

Most versions of a record differ in a few figures and its dates. A summary tells which version the other side holds, and
a table keeps the last versions of each record. What is signed does not change: the receiver applies the update to its
version, and verifies the signature over the whole record. If either side lacks that version, the record goes in full.
"""

import hashlib
from functools import lru_cache

from protocol.identity import PeerId
from protocol.murmur_pb2 import PeerRecord, RecordUpdate, Signed

NAME_BYTES = 8


@lru_cache(maxsize=4096)
def name_of(peer: PeerId) -> bytes:
    """Return the short name of a peer in updates."""
    return hashlib.blake2b(peer.encode(), digest_size=NAME_BYTES).digest()


def check_of(signed: Signed) -> int:
    """Return the hash by which an update names the version that it changes."""
    return int.from_bytes(hashlib.blake2b(signed.body, digest_size=4).digest(), "big")


def make_update(signed: Signed, record: PeerRecord, base: Signed) -> RecordUpdate:
    """Return the update that leads from an earlier version of a record to this one."""
    fields, cleared, old = PeerRecord(), [], PeerRecord.FromString(base.body)
    fields.CopyFrom(record)
    present = {field.name for field, _ in record.ListFields()}
    for field, value in old.ListFields():
        if field.name not in present:
            cleared.append(field.number)
        elif getattr(record, field.name) == value:
            fields.ClearField(field.name)
        elif field.name == "addresses":
            cleared.append(field.number)
    return RecordUpdate(
        name=name_of(signed.peer), base=check_of(base), fields=fields, cleared=cleared, signature=signed.signature
    )


def apply_update(update: RecordUpdate, base: Signed) -> Signed | None:
    """Return the record that results from an update, unverified; None if it changes another version."""
    if update.base != check_of(base):
        return None
    record = PeerRecord.FromString(base.body)
    names = {field.number: field.name for field in PeerRecord.DESCRIPTOR.fields}
    for number in update.cleared:
        if number in names:
            record.ClearField(names[number])
    record.MergeFrom(update.fields)
    body = record.SerializeToString(deterministic=True)
    return Signed(kind=base.kind, peer=base.peer, body=body, signature=update.signature)
