"""What every test shares."""

import os

# Set before torch or a tokenizer is imported: several tests may run beside each other on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this suite."""
    parser.addoption("--rewrite-traces", action="store_true", help="write the golden traces of the round machine again")
