"""Fetch the newest state of a run from its peers or its host, for `murmur export`, `generate` and `eval`.

The state is found and checked as a host does it (`node.daemon.stored_states.state_keeper`). The commits and the peers
of the run are not needed any more once it is here, so the node is a temporary one, with a key of its own.
"""

import asyncio
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

from node.commands.join.invitation import Invitation, open_invitation
from node.commands.join.joined_folder import check_pin
from node.daemon.checkpoints.new_folder import require_free
from node.daemon.checkpoints.trained_weights import TrainedWeights
from node.daemon.stored_states.fetch_stages import fetch_stages, show_progress
from node.daemon.stored_states.state_keeper import StateKeeper
from node.dashboard.observer_node import gossiping, open_observer_node
from node.data.tokenizer import TextTokenizer, open_tokenizer
from node.flags import NodeFlags
from node.model.export import write_export
from node.monitoring.logs import configure_logs
from node.options import NodeOptions, parse_node_options
from node.paths import join_dir
from node.processes.process import raise_fd_limit
from node.run_dir import RunDir
from protocol.errors import MissingFileError

logger = logging.getLogger(__name__)

FIND_SECONDS = 45.0


def fetch_model(run: str, out: Path, *, peers: Sequence[str], insecure: bool) -> int:
    """Write the newest model of a run, named as for `murmur join`, as a Hugging Face folder; return its round.

    Raises MurmurError, in particular UnreachableError if nobody who holds the state answers.
    """
    require_free(out)
    trained, tokenizer, _ = fetch_weights(run, peers=peers, insecure=insecure)
    write_export(trained, tokenizer, out)
    return trained.round


def fetch_weights(
    run: str, *, peers: Sequence[str], insecure: bool
) -> tuple[TrainedWeights, TextTokenizer, Invitation]:
    """Return the newest weights of a run, named as for `murmur join`, its tokenizer, and how it was opened.

    Raises MurmurError, in particular UnreachableError if nobody who holds the state answers.
    """
    configure_logs()
    logging.getLogger("node").setLevel(logging.WARNING)  # peers that come and go concern a node that stays
    logging.getLogger("protocol").setLevel(logging.WARNING)
    raise_fd_limit()
    invitation = open_invitation(run, insecure)
    check_pin(join_dir(invitation.manifest), invitation)
    tokenizer = _open_tokenizer(invitation, run)
    with tempfile.TemporaryDirectory(prefix="murmur-") as folder:
        options = parse_node_options(
            NodeFlags(),
            manifest=invitation.manifest,
            base=invitation.base or Path(folder),
            folder=Path(folder),
            more_peers=(*peers, *invitation.peers),
        )
        return asyncio.run(_fetch_weights(options)), tokenizer, invitation


def _open_tokenizer(invitation: Invitation, run: str) -> TextTokenizer:
    """Open the run's tokenizer. Peers do not send it, so a run from a URL or a link must use bytes."""
    file = invitation.manifest.data.tokenizer
    if file and invitation.base is None:
        raise MissingFileError(
            f"the run has its own tokenizer ({file[:80]}), which peers do not send; download the model from the run's "
            f"page, or put run.toml next to the tokenizer and give that file instead of {run}"
        )
    return open_tokenizer(file, invitation.base or Path())


async def _fetch_weights(options: NodeOptions) -> TrainedWeights:
    if options.manifest.pipeline.is_cut:
        return await fetch_stages(options)
    async with open_observer_node(options, RunDir(options.folder), keeps=True) as (node, keeper), gossiping(node):
        assert isinstance(keeper, StateKeeper)
        fetching = asyncio.create_task(keeper.fetch_newest(FIND_SECONDS))
        kept = await show_progress(fetching, keeper, keeper.folder.state_bytes)
    state = await asyncio.to_thread(keeper.folder.map_state, kept.blob)
    return TrainedWeights(options.manifest, kept.head.round, state.anchor.clone(), kept.head.tokens)
