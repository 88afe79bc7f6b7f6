"""Do the work of a replica: its trainer, its stage of a pipeline, its checkpoints, and the audits of other peers."""

import time
from collections.abc import Collection, Mapping

from node.daemon.audits.auditor import Auditor
from node.daemon.inbox import Inbox
from node.daemon.node_network import NodeNetwork
from node.daemon.peers.replica_peers import ReplicaPeers
from node.daemon.rollouts import RolloutFeed
from node.daemon.stages.build import build_stage, stage_config
from node.daemon.state.checkpointer import Checkpointer
from node.daemon.state.contributions import ContributionIntake
from node.daemon.state.replica_state import ReplicaState
from node.daemon.trainer_link import TrainerLink
from node.data.batches import VALIDATION_TOKENS
from node.loop.events import ContributionReady, SwarmChanged
from node.loop.round_loop import RoundLoop
from node.monitoring.status_reporter import StatusReporter
from node.options import NodeOptions
from node.processes.workers import BackgroundTasks
from node.run_dir import RunDir
from node.trainer.ipc.channel import (
    AnchorApplied,
    ContributionHeader,
    Evaluated,
    FromTrainer,
    PauseChanged,
    Ready,
    SiteConfig,
    TrainerConfig,
    TrainerProgress,
)
from node.trainer.ipc.own_loop import OwnLoopProcess
from node.trainer.ipc.trainer_process import TrainerProcess
from node.units import parse_host_port
from protocol.membership.record_fields import MAX_TEXT_CHARACTERS


class ReplicaWork:
    """The trainer of one replica with its checkpoints, its stage of a pipeline, and its audits.

    `stage` is None for a whole model, `auditor` in a run without audits.
    """

    def __init__(
        self,
        node: NodeNetwork,
        state: ReplicaState,
        peers: ReplicaPeers,
        loop: RoundLoop,
        inbox: Inbox,
        status: StatusReporter,
    ) -> None:
        self._node = node
        self._state = state
        self._peers = peers
        self._session = loop.session
        self._inbox = inbox
        self._status = status
        self._background = BackgroundTasks(inbox)
        self.auditor: Auditor | None = None
        if state.manifest.audits.share:
            self.auditor = Auditor(node, state, peers, loop.conduct, inbox)
            peers.receiver.on_finding = self.auditor.receive
            node.metrics.add_refusal_counter(self.auditor)
        self.stage = build_stage(state.manifest, state.run_dir, node.stages, node.transport, self._background, inbox)
        self._process = self._build_process()
        intake = ContributionIntake(
            state.contributions,
            state.store,
            state.shared_memory,
            state.contribution_file,
            state.workers.compute,
            self.auditor.work_log if self.auditor else None,
        )
        pacing = self._session.pacing
        self.trainer = TrainerLink(self._process, state.anchors, intake, pacing.steps_for, self._on_message, status)
        self.rollouts: RolloutFeed | None = None
        if state.manifest.rl is not None:
            send = self._process.send
            self.rollouts = RolloutFeed(node, state, peers.swarm_view, send, inbox, status)
        self.checkpointer = Checkpointer(
            state, self.trainer.wait_until_applied, self._requested_digests, self._held_digests, status
        )

    def _build_process(self) -> TrainerProcess:
        state, options = self._state, self._node.options
        config = TrainerConfig(
            manifest=state.manifest.to_toml(),
            base=str(options.base),
            blobs=str(state.run_dir.blobs),
            peer_id=self._node.peer_id,
            options=options.for_trainer,
            round=state.replicated.chain.round,
            validation_tokens=VALIDATION_TOKENS,
            stage=stage_config(self.stage) if self.stage else None,
            site=_site_config(options, state.run_dir),
        )
        if options.own_loop:
            return OwnLoopProcess(state.shared_memory, config, state.run_dir.path)
        return TrainerProcess(state.shared_memory, config, self.stage.memory if self.stage else None)

    def open(self) -> None:
        """Serve the stage and fetch rollouts; call it on the network."""
        if self.rollouts is not None:
            self.rollouts.start()
        if self.stage is not None:
            self.stage.start(self._process.send)

    async def drain(self) -> None:
        """Finish microbatches that others would have to make again."""
        if self.stage is not None:
            await self.stage.drain()

    async def stop(self, *, evaluates: bool) -> None:
        """Stop all work, the trainer once it has applied our head; `evaluates`: and measured its validation loss."""
        if self.stage is not None:
            self.stage.stop()
        if self.auditor is not None:
            self.auditor.stop()
        if self.rollouts is not None:
            self.rollouts.stop()
        await self.trainer.stop(self._state.replicated.chain.round, evaluates=evaluates)
        await self._state.anchors.finish_change()

    async def set_resting(self, is_resting: bool) -> None:
        """Let the trainer rest, or train again."""
        await self.trainer.set_resting(is_resting)
        if self.stage is not None:
            self.stage.set_resting(is_resting)

    async def request_early_submit(self) -> None:
        """Request the contribution to the current round before all its steps are made."""
        await self.trainer.request_early_submit()
        if self.stage is not None:
            self.stage.close_step()

    def _on_message(self, message: FromTrainer) -> None:
        directory = self._node.directory
        if self.stage is not None:
            self.stage.on_trainer_message(message)
        if self.rollouts is not None:
            self.rollouts.on_trainer_message(message)
        self._status.on_trainer_message(message)
        match message:
            case TrainerProgress():
                # A peer of a pipeline that waits for work is as slow as one that computes.
                seconds = message.seconds.get("compute", 0.0) + message.seconds.get("idle", 0.0)
                self._session.pacing.record_steps(message.step, seconds)
            case Ready():
                directory.publish(urgent=True, device=message.device[:MAX_TEXT_CHARACTERS], resting=False)
                self._inbox.post(SwarmChanged(self._peers.swarm_view.snapshot()))  # the first round may begin
            case ContributionHeader():
                if self.auditor is not None:
                    self.auditor.conditions = message.conditions
                self._inbox.post(ContributionReady())
            case PauseChanged():
                directory.publish(urgent=True, resting=bool(message.reason))
            case Evaluated() if self._state.steering.is_target_reached:
                self._peers.swarm_view.publish_loss()
                self._inbox.post(SwarmChanged(self._peers.swarm_view.snapshot()))
            case AnchorApplied() if self._is_to_be_evaluated(message):
                self.trainer.expect_evaluation()
                self._background.spawn(self.trainer.request_evaluation())

    def _is_to_be_evaluated(self, applied: AnchorApplied) -> bool:
        is_affordable = self.trainer.affords_evaluation(applied, is_last=self._state.steering.is_target_reached)
        return is_affordable and self._peers.swarm_view.is_our_turn_to_evaluate(applied.round)

    def _requested_digests(self) -> Collection[bytes]:
        offered = self._state.offered_states.recent(time.monotonic())
        return self._node.blob_service.recently_requested() | offered

    def _held_digests(self) -> Collection[bytes]:
        audits = self.auditor.held_digests if self.auditor else ()
        # The open round may still include a contribution that a commit left out.
        return [*self._peers.relay.held_digests(), *self._session.left_out, *audits]

    def status_fields(self) -> Mapping[str, object]:
        return {
            "trainer_restarts": self._process.crash_count,
            "trainer_trouble": self._process.not_running_reason,
            "unsaved": self.checkpointer.last_error,
            **(self.stage.status_fields() if self.stage else {}),
            "audits": dict(self.auditor.counts) if self.auditor else {},
            "learning": self.rollouts.status() if self.rollouts else None,
        }


def _site_config(options: NodeOptions, run_dir: RunDir) -> SiteConfig | None:
    if options.site is None:
        return None
    host, port = parse_host_port(options.site, "--site")
    return SiteConfig(host=host, port=port, key=str(run_dir.site_key), shard=options.site_shard)
