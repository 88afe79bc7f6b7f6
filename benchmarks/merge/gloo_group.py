"""The group that torch.distributed's gloo makes of the peers: all trusted, and none ever lost."""

import argparse
import os

import torch
from torch import distributed

from benchmarks.merge.worker import OrderChannel, peer_parser


def gloo_parser() -> argparse.ArgumentParser:
    parser = peer_parser()
    parser.add_argument("--device", help="the network device to use")
    parser.add_argument("--port", type=int)
    return parser


def join_group(words: argparse.Namespace) -> OrderChannel:
    """With one thread; `say` is to follow once the peer is ready."""
    conversation = OrderChannel()
    os.environ["GLOO_SOCKET_IFNAME"] = words.device
    torch.set_num_threads(1)
    conversation.send(address=words.address)
    first = conversation.receive()["addresses"][0]
    distributed.init_process_group(
        "gloo", init_method=f"tcp://{first}:{words.port}", rank=words.rank, world_size=words.peers
    )
    return conversation
