"""A program run with the matrix kernels of several processors: other orders of summing, with or without fused steps."""

import os
import subprocess
import sys
from collections.abc import Sequence

# What MKL obeys: the first on any processor, the others on Intel's alone.
KERNEL_SETTINGS = (
    {"MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1"},
    {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "OMP_NUM_THREADS": "1"},
    {"MKL_ENABLE_INSTRUCTIONS": "AVX512", "OMP_NUM_THREADS": "2"},
)


def run_on_all_kernels(program: str) -> Sequence[set[str]]:
    """By word that the Python program prints: what it was on each."""
    told = []
    for kernel in KERNEL_SETTINGS:
        command = [sys.executable, "-c", program]
        result = subprocess.run(
            command, env=os.environ | kernel, capture_output=True, text=True, timeout=60, check=True
        )
        told.append(result.stdout.split())
    return [set(column) for column in zip(*told, strict=True)]
