"""Run a program with the matrix kernels of several processors, which differ in order of summing and in fused steps."""

import os
import subprocess
import sys
from collections.abc import Sequence

# Settings of MKL: the first works on any processor, the others only on Intel's.
KERNEL_SETTINGS = (
    {"MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1"},
    {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "OMP_NUM_THREADS": "1"},
    {"MKL_ENABLE_INSTRUCTIONS": "AVX512", "OMP_NUM_THREADS": "2"},
)


def run_on_all_kernels(program: str) -> Sequence[set[str]]:
    """Return, for each word that the program prints, the set of its values on all kernels."""
    printed = []
    for kernel in KERNEL_SETTINGS:
        command = [sys.executable, "-c", program]
        result = subprocess.run(
            command, env=os.environ | kernel, capture_output=True, text=True, timeout=60, check=True
        )
        printed.append(result.stdout.split())
    return [set(column) for column in zip(*printed, strict=True)]
