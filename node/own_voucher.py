"""The voucher of this node: with it the run's organiser vouches for this node as a host of the run.

Where the organiser's key is on this machine, the node signs the voucher by itself and keeps it. Elsewhere the organiser
signs it with `murmur ticket RUN KEY --host`, and the host saves it in its folder.
"""

import logging

from node.paths import organiser_key_path
from node.run_dir import RunDir
from protocol.errors import IdentityError, PeerFault, StorageError
from protocol.files import write_atomically
from protocol.identity import Identity, PeerId
from protocol.manifest.run import Manifest
from protocol.signing import Voucher

MAX_FILE_BYTES = 4096
logger = logging.getLogger(__name__)


def find_voucher(manifest: Manifest, run_dir: RunDir, host: PeerId) -> Voucher | None:
    """Return the organiser's voucher for a host, None if there is none; a key on this machine signs it.

    A run without an organiser needs none, nor does the organiser's own key.
    """
    organiser = manifest.run.organiser_key
    if organiser in ("", host):
        return None
    return _read(manifest, run_dir, host) or _issue(manifest, run_dir, host)


def _read(manifest: Manifest, run_dir: RunDir, host: PeerId) -> Voucher | None:
    try:
        text = run_dir.voucher.read_bytes()[:MAX_FILE_BYTES].decode(errors="replace")
        voucher = Voucher.parse(text, manifest.run.organiser_key)
        voucher.verify(manifest.whole_run_id)
    except FileNotFoundError:
        return None
    except (OSError, PeerFault) as error:
        logger.warning("cannot use %s: %s", run_dir.voucher, error)
        return None
    if voucher.host != host:  # the folder has a new key
        logger.warning("%s is for another key than that of this node, %s", run_dir.voucher, host)
        return None
    return voucher


def _issue(manifest: Manifest, run_dir: RunDir, host: PeerId) -> Voucher | None:
    """Sign a voucher and keep it, if the key on this machine is that of the run's organiser."""
    path = organiser_key_path()
    try:
        identity = Identity.load_or_create(path) if path.exists() else None
        if identity is None or identity.peer_id != manifest.run.organiser_key:
            return None
        voucher = Voucher.issue(identity, manifest.whole_run_id, host)
        write_atomically(run_dir.voucher, f"{voucher}\n".encode())
    except (IdentityError, StorageError) as error:
        logger.warning("the organiser's key cannot vouch for this host: %s", error)
        return None
    return voucher
