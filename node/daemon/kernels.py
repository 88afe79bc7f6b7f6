"""Compile the kernels of a run before its first round."""

import asyncio
import logging

from node.processes.workers import RunInThread
from optim.kernels.warmup import warm_up
from optim.method import Method

logger = logging.getLogger(__name__)

SLOW_COMPILE_SECONDS = 5.0  # a shorter warm-up found the kernels compiled


async def compile_kernels(method: Method, run_in_thread: RunInThread) -> None:
    """Compile the kernels of a method in a thread; say so if it takes long."""
    text = "compiling the kernels of this run, once for this machine; it may take a minute"
    notice = asyncio.get_running_loop().call_later(SLOW_COMPILE_SECONDS, logger.info, text)
    try:
        await run_in_thread(warm_up, method)
    finally:
        notice.cancel()
