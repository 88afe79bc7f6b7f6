"""Fetch the newest state of a run from its peers or its host, for `murmur export`, `generate` and `eval`.

The state is found and proven as a host does it (`node.daemon.stored_states.state_store`). Once it has arrived, the
commits and the peers of the run are not needed, so the node is a temporary one with a new key.

The stages of a pipeline continue while their states travel, and do not wait for us. So the first downloads show how
long one takes, and the next ones ask for a round that is a multiple of enough rounds: all stages pass it in turn.
"""

import asyncio
import logging
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from node.commands.join.invitation import Invitation, check_pin, open_invitation
from node.daemon.checkpoints.new_folder import require_free
from node.daemon.checkpoints.trained_weights import TrainedWeights, load_trained_weights
from node.daemon.stored_states.stage_stores import StageStores, gather_stages
from node.daemon.stored_states.state_store import MIN_BYTES_PER_SECOND, MIN_FETCH_SECONDS, StateStore
from node.dashboard.observer_node import gossiping, open_node, open_observer_node
from node.data.tokenizer import TextTokenizer, open_tokenizer
from node.flags import NodeFlags
from node.model.export import CardFacts, merge_adapter, write_export
from node.monitoring.display import configure_logs
from node.monitoring.status_line import ByteProgress
from node.options import NodeOptions, parse_node_options
from node.paths import join_dir, newest_checkpoints
from node.processes.process import raise_fd_limit
from node.run_dir import RunDir
from protocol.errors import MissingFileError, UnreachableError
from protocol.tasks import cancel_and_wait

logger = logging.getLogger(__name__)

FIND_SECONDS = 45.0  # without a byte of a state
MOVING_TARGETS = 4  # states of each stage that may arrive before all are of one round
PROGRESS_SECONDS = 0.3
Result = TypeVar("Result")


async def show_progress(fetching: asyncio.Task[Result], counter: StateStore | StageStores, size: int) -> Result:
    """Show how many of `size` bytes have arrived until the task ends, and return its result."""
    with ByteProgress("fetching the state", size) as progress:
        shown = 0
        try:
            while not (await asyncio.wait({fetching}, timeout=PROGRESS_SECONDS))[0]:
                received = min(counter.bytes_received, size)
                progress.advance(received - shown)
                shown = received
            return fetching.result()
        finally:
            await cancel_and_wait((fetching,))


async def fetch_stages(options: NodeOptions) -> TrainedWeights:
    """Return the weights of the whole model at a round that all stages have passed.

    Raises UnreachableError if no peer or host has them, or the states of no round come together.
    """
    folder, stages = RunDir(options.folder), range(options.manifest.pipeline.stages)
    options.folder.joinpath("run.toml").write_text(options.manifest.to_toml())
    async with open_node(options, folder) as node:
        stores = gather_stages(node, folder, stages)
        await node.open()
        async with gossiping(node):
            fetching = asyncio.create_task(_fetch_common(stores, options.folder))
            await show_progress(fetching, stores, stores.state_bytes)
    return await asyncio.to_thread(load_trained_weights, options.folder)


async def _fetch_common(stores: StageStores, folder: Path) -> None:
    """Run the stores until they have the states of one round."""
    keeping = asyncio.create_task(stores.run())
    limit = MOVING_TARGETS * (MIN_FETCH_SECONDS + stores.state_bytes / MIN_BYTES_PER_SECOND)
    ends, stalls, received = time.monotonic() + limit, time.monotonic() + FIND_SECONDS, 0
    try:
        while not newest_checkpoints(folder):
            now = time.monotonic()
            if stores.bytes_received != received:
                received, stalls = stores.bytes_received, now + FIND_SECONDS
            if now > min(ends, stalls):
                raise UnreachableError(
                    f"the stages of the run do not come together ({stores.describe()}); try again later"
                )
            await asyncio.wait({keeping}, timeout=PROGRESS_SECONDS)
            if keeping.done():
                await keeping
    finally:
        await cancel_and_wait((keeping,))


def fetch_model(
    run: str, out: Path, *, peers: Sequence[str], insecure: bool, merged: bool = False, repository: str = ""
) -> int:
    """Write the newest model of a run, named as for `murmur join`, as a Hugging Face folder; return its round.

    Args:
        merged: of an adapter, the whole model.
        repository: ORG/NAME of the Hub where the folder goes, for its card.

    Raises MurmurError, in particular UnreachableError if no peer with the state answers.
    """
    require_free(out)
    trained, tokenizer, invitation = fetch_weights(run, peers=peers, insecure=insecure)
    if merged:
        trained = merge_adapter(trained, invitation.base or Path())
    write_export(trained, tokenizer, out, CardFacts(repository))
    return trained.round


def fetch_weights(
    run: str, *, peers: Sequence[str], insecure: bool
) -> tuple[TrainedWeights, TextTokenizer, Invitation]:
    """Return the newest weights of a run, named as for `murmur join`, its tokenizer, and how it was opened.

    Raises MurmurError, in particular UnreachableError if no peer with the state answers.
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
        ).model_copy(update={"trust": invitation.trust, "requires_trust": False})
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
    async with open_observer_node(options, RunDir(options.folder), keeps=True) as (node, store), gossiping(node):
        assert isinstance(store, StateStore)
        fetching = asyncio.create_task(store.fetch_newest(FIND_SECONDS))
        kept = await show_progress(fetching, store, store.folder.state_bytes)
    state = await asyncio.to_thread(store.folder.map_state, kept.blob)
    return TrainedWeights(options.manifest, kept.head.round, state.anchor.clone(), kept.head.tokens)
