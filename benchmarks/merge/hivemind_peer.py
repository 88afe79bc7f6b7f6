"""hivemind's DecentralizedAverager: its butterfly all-reduce over libp2p streams.

Release 1.1.12 does not work with numpy 2.4 for 8 bits: reading a part fails, the part is left as it was, and `step`
reports success. Here its reader takes the number of levels as later sources of hivemind do (`.item()`).

Measured from the trigger on, when the group is formed already and all its members know one another.
"""

import argparse
import os
import time
from contextlib import suppress

import hivemind
import numpy as np
import torch
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.compression import Float16Compression
from hivemind.compression.quantization import Quantization, Uniform8BitQuantization
from hivemind.proto import runtime_pb2

from benchmarks.merge.random_vectors import random_vector, relative_error
from benchmarks.merge.worker import OrderChannel, die_with_parent, peer_parser

COMPRESSIONS = {"8bit": Uniform8BitQuantization, "fp16": Float16Compression}
MATCHMAKING_SECONDS = 5.0
STEP_SECONDS = 120.0


def extract(self: Quantization, serialized: runtime_pb2.Tensor) -> torch.Tensor:
    """A part's values: how many levels, the levels, and each value's level."""
    count = np.frombuffer(serialized.buffer, count=1, dtype=np.int64).item()
    levels = np.frombuffer(serialized.buffer, offset=8, count=count, dtype=self.codebook_dtype)
    places = np.frombuffer(serialized.buffer, offset=8 + levels.nbytes, dtype=self.indices_dtype)
    shape = tuple(serialized.size)
    chosen: torch.Tensor = torch.as_tensor(levels)[torch.as_tensor(places, dtype=torch.int64).reshape(shape)]
    return chosen


class Peer:
    def __init__(self, words: argparse.Namespace, conversation: OrderChannel) -> None:
        self._peers = words.peers
        self._own = random_vector(words.rank, words.numel)
        self._step: StepControl | None = None
        listen = f"/ip4/{words.address}/tcp/0"
        options = {"host_maddrs": [listen], "start": True, "use_relay": False, "use_auto_relay": False}
        if words.rank == 0:
            dht = hivemind.DHT(**options)
            conversation.send(address=str(dht.get_visible_maddrs()[0]))
            conversation.receive()
        else:
            conversation.send(address="")
            dht = hivemind.DHT(initial_peers=conversation.receive()["addresses"][:1], **options)
        self._averager = hivemind.DecentralizedAverager(
            [self._own.clone()],
            dht,
            start=True,
            prefix="merge",
            target_group_size=words.peers,
            min_matchmaking_time=MATCHMAKING_SECONDS,
            request_timeout=MATCHMAKING_SECONDS / 2,
            compression=COMPRESSIONS[words.compression](),
            next_chunk_timeout=STEP_SECONDS,
        )

    def prepare(self) -> None:
        with self._averager.get_tensors() as tensors:
            tensors[0].copy_(self._own)
        self._step = self._averager.step(require_trigger=True, wait=False, timeout=STEP_SECONDS)
        ends = time.monotonic() + STEP_SECONDS
        while self._step.stage != AveragingStage.AWAITING_TRIGGER:
            if time.monotonic() > ends:
                raise SystemExit("no group was formed")
            time.sleep(0.01)

    def go(self) -> int:
        """How many took part."""
        assert self._step is not None
        self._step.allow_allreduce()
        return len(self._step.result(timeout=STEP_SECONDS))

    def check(self) -> float:
        with self._averager.get_tensors() as tensors:
            return relative_error(tensors[0], self._peers)


def main() -> None:
    parser = peer_parser()
    parser.add_argument("--numel", type=int)
    parser.add_argument("--compression", choices=COMPRESSIONS)
    words = parser.parse_args()
    Quantization.extract = extract
    os.register_at_fork(after_in_child=die_with_parent)  # its children would live on
    conversation = OrderChannel()
    peer = Peer(words, conversation)
    conversation.send()
    while True:
        match next(iter(conversation.receive())):
            case "prepare":
                peer.prepare()
                conversation.send()
            case "go":
                conversation.send(members=peer.go())
            case "settle":
                conversation.send()
            case "check":
                conversation.send(relative_error=peer.check())


if __name__ == "__main__":
    with suppress(EOFError):  # whoever gave the orders is gone
        main()
