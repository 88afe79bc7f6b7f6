"""Which devices multiply matrices in bf16 by themselves. Others emulate it, more slowly than fp32."""

from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

import torch

LEAST_CAPABILITY: Final = (8, 0)  # of NVIDIA's cards: those from 2020 on
CPU_FLAGS: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # the last one on Arm


def has_bf16(device: torch.device) -> bool:
    """Return whether products of matrices in bf16 are the fastest way on this device."""
    if device.type == "cpu":
        return not CPU_FLAGS.isdisjoint(_cpu_flags())
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


@cache
def _cpu_flags() -> frozenset[str]:
    """Return the features of the first processor; empty where the system does not list them."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    return frozenset()
