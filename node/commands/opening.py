"""Open the model that a user names, whether it is on this machine or with the peers of a run. It loads torch."""

from collections.abc import Sequence
from pathlib import Path

from node.commands.options import names_run
from node.model.opened_model import OpenedModel, open_folder


def open_model(source: str, peers: Sequence[str], insecure: bool) -> OpenedModel:
    """Open the model in a folder, or fetch the newest one of a run.

    Args:
        peers: of a run: multiaddresses to connect to first.
        insecure: also accept plain http:// over the internet.

    Raises MurmurError, one line that says what to do.
    """
    if not names_run(source):
        return open_folder(Path(source))
    from node.commands.fetch_model import fetch_weights  # the network

    trained, _, invitation = fetch_weights(source, peers=peers, insecure=insecure)
    return OpenedModel.of(trained, invitation.base or Path())
