"""The processes of a hostile test: honest nodes that record their rounds, and nodes whose methods an attack replaces.

Both are `murmur join` with a trainer of its own. The trainer sleeps after each step, as one on an accelerator leaves
the processors idle: so the pace of a swarm shows the protocol and not the processor time that an attacker takes.
"""

import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from node.monitoring.status_reporter import StatusReporter
from node.trainer.ipc.trainer_process import TrainerProcess
from node.trainer.loop import Trainer
from node.trainer.stages.stage_work import StageWork
from tests.hostile.patches import replaced
from tests.hostile.switches import Switches

STEP_SECONDS = 0.05  # of sleep after each inner step
FALSE_RESULTS = "false-activations", "false-gradients"  # switches of a hostile node, by its passes
NOISE = 0.1  # of the spread of what a stage passes on: plausible, and wrong
PASS_SECONDS = 0.02  # of sleep after each pass of a microbatch through a stage
ROUNDS_FILE = "rounds.jsonl"
MAX_DESCRIPTORS = 5  # of a trainer: channel, memory, perhaps a file and activations, and its log


def honest(home: str, temporary: str, arguments: Sequence[str]) -> None:
    """Run an honest node; its switches turn single rules off, as controls of the attacks."""
    _run_node(Path(home), temporary, arguments, _turn_rules_off)


def _turn_rules_off(switches: Switches) -> None:
    if switches.names():
        from tests.hostile.rules import install_rules

        install_rules(switches)


def hostile(home: str, temporary: str, arguments: Sequence[str]) -> None:
    """Run a node that behaves, except for the attacks that its switches turn on."""
    from tests.hostile.attacks import install_members

    _run_node(Path(home), temporary, arguments, install_members)


def _run_node(home: Path, temporary: str, arguments: Sequence[str], install: Any) -> None:
    tempfile.tempdir = os.environ["TMPDIR"] = temporary
    switches = Switches(home)
    trainer_socket, trainer_pid = _fork_trainer(switches)
    _hand_over_trainer(trainer_socket, trainer_pid)
    _record_rounds(home / ROUNDS_FILE)
    install(switches)
    from node.cli import main

    sys.argv = ["murmur", "join", *arguments]
    main()


def _record_rounds(path: Path) -> None:
    """Append a line for each head that the node reports."""

    def record_rounds(original: Any, self: StatusReporter, head: Any, state: bytes, commits: Any, outcome: Any) -> None:
        original(self, head, state, commits, outcome)
        senders = [[entry.sender for entry in commit.contributions] for commit in commits]
        line = {"time": time.monotonic(), "round": head.round, "digest": head.digest.hex(), "state": state.hex(),
                "senders": senders, "tokens": head.tokens, "loss": self.status().loss}  # fmt: skip
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    replaced(StatusReporter, "record_rounds", record_rounds)


def _fork_trainer(switches: Switches) -> tuple[socket.socket, int]:
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        return ours, pid
    ours.close()
    _become_trainer(theirs, switches)
    raise AssertionError("the trainer exits")


def _become_trainer(control: socket.socket, switches: Switches) -> None:
    """Wait for the descriptors of channel, shared memory and log, then train until stopped."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.setpgid(0, 0)
        _, descriptors, _, _ = socket.recv_fds(control, 1, MAX_DESCRIPTORS)
        if descriptors:
            channel, *memories, errors = descriptors
            os.dup2(errors, 2)
            replaced(Trainer, "_take_step", _sleep_after_step)
            replaced(StageWork, "compute", _sleep_after_pass)
            replaced(StageWork, "_put_output", functools.partial(_spoil_output, switches))
            from node.trainer.__main__ import main

            code = main([str(descriptor) for descriptor in (os.getppid(), channel, *memories)])
    finally:
        os._exit(code)


def _sleep_after_step(original: Any, self: Trainer) -> None:
    original(self)
    time.sleep(STEP_SECONDS)


def _sleep_after_pass(original: Any, self: StageWork, command: Any) -> Any:
    done = original(self, command)
    time.sleep(PASS_SECONDS)
    return done


def _spoil_output(switches: Switches, original: Any, self: StageWork, command: Any, output: Any) -> None:
    """Add noise to what a stage passes on, while a switch is on."""
    name = FALSE_RESULTS[command.is_backward]
    if output is not None and command.output is not None and switches.is_on(name):
        output = output + NOISE * output.std() * torch.randn_like(output)
        switches.note_use(name)
    original(self, command, output)


def _hand_over_trainer(control: socket.socket, pid: int) -> None:
    """Use the forked process as the first trainer of the daemon; another one is started as always."""
    waiting = [ForkedTrainer(pid)]

    async def execute(original: Any, self: TrainerProcess, channel_fd: int) -> Any:
        if not waiting:
            return await original(self, channel_fd)
        trainer = waiting.pop()
        read_end, write_end = os.pipe()
        socket.send_fds(control, [b"!"], [channel_fd, *self._memory_fds, write_end])
        os.close(write_end)
        await trainer.read_errors(read_end)
        return trainer

    replaced(TrainerProcess, "_execute", execute)


class ForkedTrainer:
    """A trainer that was forked, with the methods of asyncio's subprocess that its supervisor uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stderr: asyncio.StreamReader | None = None

    async def read_errors(self, descriptor: int) -> None:
        loop = asyncio.get_running_loop()
        self.stderr = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(self.stderr)
        await loop.connect_read_pipe(lambda: protocol, os.fdopen(descriptor, "rb"))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    async def wait(self) -> int:
        if self.returncode is None:
            descriptor, ended, loop = os.pidfd_open(self.pid), asyncio.Event(), asyncio.get_running_loop()
            loop.add_reader(descriptor, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode
