"""Where numba takes its settings from."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("module", ["optim.kernels.jit", "numba"])
def test_settings_in_the_working_directory_are_not_read(tmp_path: Path, module: str) -> None:
    """Control: numba alone reads them, and a file there turns its compiler off."""
    (tmp_path / ".numba_config.yaml").write_text("disable_jit: 1\n")
    compiled = "numba.njit('int64(int64)')(lambda number: number + 1)"
    program = f"import {module}, numba, os; {compiled}; print(numba.config.DISABLE_JIT, os.getcwd())"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    found = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=100
    )
    assert found.stdout == f"{int(module == 'numba')} {tmp_path}\n"
