"""Attack A: strangers announce a model of their own, and a person exports the model of the run from its peers."""

import asyncio
import contextlib
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from node.processes.process import python_environment
from protocol.consensus.chain import ChainHead, ChainLog
from protocol.errors import PeerFault, UnreachableError
from protocol.murmur_pb2 import ChainReply
from protocol.signing import MAX_CHAIN_TOKENS
from tests.hostile.attackers.forgery import Forger
from tests.hostile.attackers.history import _log_of, _show, ask_for_chain
from tests.hostile.attackers.stranger import Stranger, open_together

INVENTED_ROUND, INVENTED_COMMITS = 4000, 3
WEIGHT = 0.25  # all weights of the strangers' model
EXPORT_SECONDS, PAUSE_SECONDS = 80.0, 0.5


async def exported_model(stranger: Stranger) -> None:
    """Attack A: keys announce the newest round of all, with a chain; `foreign` is 1 if their model is exported."""
    keys = stranger.with_others(int(stranger.options["keys"]))
    forgers = [Forger(key) for key in keys]
    await open_together(keys)
    honest = await _ask(stranger)
    state = [forger.store.put_in_memory(_same_weights(forger)) for forger in forgers][0]
    voters = replace(_log_of(stranger, honest).electorates[-1], round=INVENTED_ROUND)
    start = ChainHead(INVENTED_ROUND, bytes(range(32)), MAX_CHAIN_TOKENS // 2)
    log, head = forgers[0].invent_rounds(ChainLog(voters), start, state.digest, INVENTED_COMMITS)
    for key, forger in zip(keys, forgers, strict=True):
        _show(key, forger, honest, log, head, state)
    out = await _export(stranger, "proof" in stranger.options["rules_off"])
    stranger.note(foreign=float(_is_foreign(out)), exported=float(out is not None))
    stranger.begin()


async def _ask(stranger: Stranger) -> ChainReply:
    """Ask until an honest peer answers: its machine may be busy."""
    while True:
        with contextlib.suppress(UnreachableError, PeerFault):
            return await ask_for_chain(stranger)
        await asyncio.sleep(PAUSE_SECONDS)


def _same_weights(forger: Forger) -> bytes:
    return np.full(forger.state_bytes // 4, WEIGHT, np.float32).tobytes()


async def _export(stranger: Stranger, believes: bool) -> Path | None:
    """Let a person export the model of the run; return the folder, or None if the command refuses."""
    out = stranger.home / "model"
    shutil.rmtree(out, ignore_errors=True)
    peers = [word for address in stranger.addresses for word in ("--peer", address)]
    command = ["-m", "tests.hostile.person", str(int(believes)), "export", str(stranger.run), str(out), *peers]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, env=python_environment())
    try:
        await asyncio.wait_for(process.wait(), EXPORT_SECONDS)
    except TimeoutError:
        process.kill()
    return out if process.returncode == 0 else None


def _is_foreign(out: Path | None) -> bool:
    if out is None:
        return False
    weights = load_file(out / "model.safetensors")
    return all(bool(np.all(values == WEIGHT)) for values in weights.values())
