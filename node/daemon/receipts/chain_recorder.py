"""Keep the signed commits that a training node follows, so that its owner can make a receipt without a host."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from node.daemon.node import Node
from node.daemon.receipts.commit_file import COMMIT_FILE_NAME, CommitFileHeader
from node.daemon.receipts.commit_log import CommitLog
from node.model import shapes_of
from protocol.consensus.history.chain import Chain, ChainHead
from protocol.errors import StorageError
from protocol.manifest.run import Manifest
from protocol.pipeline.stages.stage import stage_of
from protocol.tasks import cancel_and_wait

logger = logging.getLogger(__name__)

RECORD_SECONDS = 2.0  # the chain keeps the last 64 commits


def commit_file_header(manifest: Manifest) -> CommitFileHeader:
    """Return the first line of the file of a run's commits."""
    shapes, organiser = shapes_of(manifest).hash(), manifest.run.organiser_key
    whole_run = "" if manifest.run_id == manifest.whole_run_id else manifest.whole_run_id
    return CommitFileHeader(manifest.run_id, manifest.method.recipe, shapes, organiser, manifest.admission, whole_run)


def receipt_name(manifest: Manifest) -> str:
    """Return the name of a run in its receipts, with the stage of a pipeline."""
    stage = stage_of(manifest)
    return manifest.run.name if stage is None else f"{manifest.run.name}, stage {stage}"


@asynccontextmanager
async def record_chain(node: Node) -> AsyncIterator[None]:
    """Keep the commits of the node's run in its folder while the context is open."""
    replica = next(iter(node.replicas.values()))
    chain = replica.state.replicated.chain
    log = CommitLog.open(node.run_dir.path / COMMIT_FILE_NAME, commit_file_header(replica.manifest))
    task = asyncio.create_task(_record_forever(log, chain), name="chain recorder")
    try:
        yield
    finally:
        failed = task.done()
        await cancel_and_wait((task,))
        if not failed:
            _record(log, chain)


async def _record_forever(log: CommitLog, chain: Chain) -> None:
    """Record until cancelled, or until the disk refuses: training goes on without the commits."""
    while _record(log, chain):
        await asyncio.sleep(RECORD_SECONDS)


def _record(log: CommitLog, chain: Chain) -> bool:
    try:
        append_new_commits(log, chain)
    except StorageError as error:
        logger.warning("the commits of the run are no longer kept for receipts: %s", error)
        return False
    return True


def append_new_commits(log: CommitLog, chain: Chain) -> None:
    """Bring the log to the head of the chain, as far as the chain still holds the commits."""
    if log.head == chain.head:
        return
    found = chain.log_since(log.head.round)
    if found is None or not found.commits or found.commits[0].body.base != log.head.digest:  # another chain, or a gap
        found = chain.log
    if found.commits:  # else the state was downloaded, and the first commit after it is still to come
        first, tokens = found.commits[0].body, found.commits[0].certificate.basis.tokens
        log.extend(ChainHead(first.round, first.base, tokens), found)
