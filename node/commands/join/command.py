"""`murmur join`: one node of a run, in this process. Slow imports come after the first log line."""

import asyncio
import logging
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from node.commands.join.consent import require_data_consent
from node.commands.join.invitation import DATA, Invitation, check_pin, open_or_recall, save_invitation
from node.flags import NodeFlags
from node.monitoring.display import Display, configure_logs
from node.options import NodeOptions, parse_node_options
from node.own_loops import require_our_loop
from node.own_ticket import require_admission
from node.paths import join_dir
from node.processes.process import rare_garbage_collection
from node.run_dir import RunDir
from node.units import format_count
from protocol.errors import DataError, MissingFileError, UsageError
from protocol.manifest.model import HUB_SCHEME
from protocol.manifest.reading import load_manifest
from protocol.signing import fingerprint

if TYPE_CHECKING:
    from node.daemon.lifecycle import FinishedRun
    from node.daemon.node import Node

logger = logging.getLogger(__name__)
Role = Literal["trainer", "rollout"]


def join_run(
    run: str, flags: NodeFlags, *, folder: Path | None = None, insecure: bool = False, allow_data: bool = False,
    ticket: Path | None = None, base_model: str | None = None, role: Role = "trainer",
) -> None:  # fmt: skip
    """Take part until the run reaches its target or Ctrl-C. Raises MurmurError."""
    with configure_logs(flags.log_json, flags.verbose) as display:
        with display.activity("opening the run"):
            invitation = _with_base_model(open_or_recall(run, folder, insecure), base_model)
        node_dir = (folder or invitation.folder or join_dir(invitation.manifest)).resolve()
        require_admission(invitation.manifest, RunDir(node_dir), ticket)
        if role == "rollout":
            _roll_out(run, flags, display, node_dir, invitation)
        else:
            _join_run(run, flags, display, node_dir, invitation, allow_data)


def _with_base_model(invitation: Invitation, source: str | None) -> Invitation:
    """Return the invitation with the place of the model that the run's adapter changes, as the user names it."""
    if source is None:
        return invitation
    if invitation.manifest.adapter is None:
        raise UsageError("--base-model: this run has no adapter; leave it out")
    whole = source if source.startswith(HUB_SCHEME) else str(Path(source).expanduser().resolve())
    return replace(invitation, manifest=invitation.manifest.with_base_model(whole))


def _join_run(
    run: str, flags: NodeFlags, display: Display, node_dir: Path, invitation: Invitation, allow_data: bool
) -> None:
    manifest, settings = invitation.manifest, _settings_of(flags, node_dir, invitation)
    with display.activity("loading PyTorch"), rare_garbage_collection():
        from node.commands.capacity import require_capacity
        from node.commands.join.finished_run import find_end
        from node.commands.plan.command import warn_if_poor
        from node.daemon.lifecycle import run_node
        from node.data.check import check_and_log_text
        from node.from_manifest import require_program
        from node.model.weight_files import require_frozen
        from node.trainer.devices.device import require_usable_device

    require_program(manifest, invitation.text)  # an unknown method must fail before the folder is locked
    if not settings.own_loop:
        require_our_loop(manifest)
        require_usable_device(settings)
    if invitation.is_downloaded and not settings.own_loop:
        require_data_consent(manifest.data, settings.base, allow_data)
    require_capacity(settings, invitation.is_downloaded)
    _verify_organiser(node_dir, invitation)
    warn_if_poor(manifest, settings.listen)
    try:
        if not settings.own_loop:  # which reads a text of its own
            with display.activity("reading the text"):
                check_and_log_text(manifest, settings.base)  # before this peer is announced
                require_frozen(settings.manifest.model, settings.base)
    except (DataError, MissingFileError):
        with display.activity("asking whether the run is over"):
            finished = asyncio.run(find_end(settings))
        if finished is None:
            raise
    else:
        finished = asyncio.run(run_node(settings, display, _record_commits))
    _print_end(display, finished, run, node_dir)


def _roll_out(run: str, flags: NodeFlags, display: Display, node_dir: Path, invitation: Invitation) -> None:
    """Answer questions with the newest model instead of training; the text of the run is not needed."""
    manifest, settings = invitation.manifest, _settings_of(flags, node_dir, invitation)
    with display.activity("loading PyTorch"), rare_garbage_collection():
        from node.commands.capacity import require_rollout_capacity
        from node.from_manifest import require_program
        from node.model.weight_files import require_frozen
        from node.rollout.command import require_followable, run_rollout_peer
        from node.trainer.devices.device import require_usable_device

    require_program(manifest, invitation.text)
    require_followable(manifest)
    require_usable_device(settings)
    require_rollout_capacity(settings, invitation.is_downloaded)
    require_frozen(manifest.model, settings.base)
    _verify_organiser(node_dir, invitation)
    _print_end(display, asyncio.run(run_rollout_peer(settings, display)), run, node_dir)


def _settings_of(flags: NodeFlags, node_dir: Path, invitation: Invitation) -> NodeOptions:
    settings = parse_node_options(
        flags,
        manifest=invitation.manifest,
        base=invitation.base or node_dir / DATA,
        folder=node_dir,
        more_peers=invitation.peers,
    )
    if settings.trust is None and invitation.trust is not None:
        return settings.model_copy(update={"trust": invitation.trust, "requires_trust": False})
    return settings


def _print_end(display: Display, finished: "FinishedRun | None", run: str, node_dir: Path) -> None:
    from node.commands.join.finished_run import describe_end

    display.close()
    if finished is not None:
        for line in describe_end(finished, run, node_dir):
            print(line, flush=True)


def _record_commits(node: "Node") -> AbstractAsyncContextManager[None]:
    from node.daemon.receipts.commit_log import record_chain

    replica = next(iter(node.replicas.values()))
    return record_chain(replica.state.replicated.chain, replica.manifest, node.run_dir.path)


def _verify_organiser(node_dir: Path, invitation: Invitation) -> None:
    """Log who organises the run; pin the organiser's key at the first visit."""
    run, method, target = invitation.manifest.run, invitation.manifest.method, invitation.manifest.target
    if (node_dir / "run.toml").exists() and load_manifest(node_dir / "run.toml").run_id != invitation.manifest.run_id:
        return  # the node refuses the folder later
    is_new = check_pin(node_dir, invitation)
    tokens = f"target {format_count(target.tokens)} tokens" if target.tokens else "no target"
    aim = f"target {target.rounds} rounds" if target.rounds else tokens
    if run.organiser_key:
        aim += " as it began"  # a revision may have moved it
    logger.info("run %s: %s, %s; the node's folder is %s", run.name, method.recipe, aim, node_dir)
    save_invitation(node_dir, invitation)
    if invitation.organiser is not None:
        when = "seen for the first time and saved" if is_new else "as before"
        is_host = run.organiser_key not in ("", invitation.organiser)
        whose = "fingerprint of the host, for which no organiser vouches:" if is_host else "organiser's fingerprint"
        logger.info("%s %s, %s", whose, fingerprint(invitation.organiser), when)
