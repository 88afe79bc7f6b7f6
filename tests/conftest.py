"""What every test shares."""

import os

# Set before torch or a tokenizer is imported: several tests may run beside each other on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import gc
from collections.abc import Generator, Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this suite."""
    parser.addoption("--rewrite-traces", action="store_true", help="write the golden traces of the round machine again")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect ten thousand tests without searching them for garbage again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


SEED_BATCHES = 3  # of each test of seeds; the others are part of `make nightly`


LONGEST = (
    "node/trainer/test_main.py",
    "simulation/test_planted_bugs.py",
    "test_exact_seeds.py",
    "test_trainer_process.py",
    "test_liars.py",
    "test_site.py",
    "node/trainer/ranks/",
)  # files of one to five minutes, the longest first


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, lest one worker waits for another, and leave most seeds to `make nightly`."""
    items.sort(key=lambda item: next((n for n, name in enumerate(LONGEST) if name in item.nodeid), len(LONGEST)))
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec and item.get_closest_marker("seeds") and max(callspec.indices.values()) >= SEED_BATCHES:
            item.add_marker(pytest.mark.nightly)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute with one thread, so that sums have the same bits on every machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the nodes of the tests out of the registry of this user's nodes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield
