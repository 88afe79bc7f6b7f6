"""Name the commit that a figure was measured on."""

import subprocess
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]


def commit(digits: int = 8) -> str:
    """Return the name of the commit that is checked out; empty without git."""
    told = subprocess.run(
        ["git", "rev-parse", f"--short={digits}", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    return told.stdout.strip()
