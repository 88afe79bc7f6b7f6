"""The room that a run takes of a machine, and what a downloaded manifest may take without a question."""

from pathlib import Path
from typing import Any

import pytest

from node.commands.capacity import Needs, check_capacity, estimate_needs
from node.commands.join.consent import require_data_consent
from node.flags import NodeFlags
from node.options import NodeOptions, parse_node_options
from protocol.errors import DeviceError, OrganiserError, StorageError, UsageError
from protocol.manifest.run import Manifest
from protocol.manifest.sections import DataSection
from tests.node.small_run import MANIFEST

NEEDED = Needs(memory=4_000_000_000, disk=8_000_000_000)
PLENTY = Needs(memory=64_000_000_000, disk=640_000_000_000)
TIGHT = Needs(memory=6_000_000_000, disk=10_000_000_000)


def options(folder: Path, **flags: Any) -> NodeOptions:
    return parse_node_options(NodeFlags(**flags), manifest=MANIFEST, base=folder, folder=folder)


def test_run_that_fits_is_not_asked_about(tmp_path: Path) -> None:
    check_capacity(NEEDED, PLENTY, options(tmp_path), is_downloaded=True)


@pytest.mark.parametrize("is_downloaded", [True, False])
def test_run_that_does_not_fit_is_refused_with_the_numbers(tmp_path: Path, is_downloaded: bool) -> None:
    with pytest.raises(DeviceError, match=r"4.0 GB of memory, but 3.0 GB"):
        check_capacity(NEEDED, Needs(3_000_000_000, PLENTY.disk), options(tmp_path, memory="1GB"), is_downloaded)
    with pytest.raises(StorageError, match=r"8.0 GB of disk space, but may take 7.0 GB"):
        check_capacity(NEEDED, PLENTY, options(tmp_path, disk="7GB"), is_downloaded)


@pytest.mark.parametrize(
    ("available", "option"),
    [(Needs(TIGHT.memory, PLENTY.disk), "--memory"), (Needs(PLENTY.memory, TIGHT.disk), "--disk")],
)
def test_downloaded_run_that_takes_most_of_a_machine_needs_consent(
    tmp_path: Path, available: Needs, option: str
) -> None:
    with pytest.raises(UsageError, match=option):
        check_capacity(NEEDED, available, options(tmp_path), is_downloaded=True)
    check_capacity(NEEDED, available, options(tmp_path, memory="5GB", disk="9GB"), is_downloaded=True)
    check_capacity(NEEDED, available, options(tmp_path), is_downloaded=False)  # one's own manifest


def test_large_model_needs_more_than_any_machine_before_anything_is_allocated() -> None:
    """The manifest that took 24 GB: the arena of shared memory alone."""
    model = MANIFEST.model.model_copy(update={"width": 2**16, "hidden": 2**18, "layers": 1024, "heads": 1024})
    huge: Manifest = MANIFEST.model_copy(update={"model": model})
    assert estimate_needs(huge, "cpu").memory > 10**15
    assert estimate_needs(MANIFEST, "cpu").memory < 10**9


def data(**values: str) -> DataSection:
    return DataSection.model_validate({"source": "hf", "path": "owner/name", **values})


def test_data_set_of_a_downloaded_manifest_needs_consent(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="owner/name.*--allow-data"):
        require_data_consent(data(), tmp_path, is_allowed=False)
    require_data_consent(data(), tmp_path, is_allowed=True)
    require_data_consent(data(source="text", path="*.txt"), tmp_path, is_allowed=False)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    require_data_consent(data(), tmp_path, is_allowed=False)  # a folder on this machine


@pytest.mark.parametrize(
    "path", ["https://evil.example/x", "file:///etc", "a/b/c", "../x", "", "x\n", "a b", "s3://x/y"]
)
def test_data_set_of_a_downloaded_manifest_is_a_name_on_the_hub(tmp_path: Path, path: str) -> None:
    with pytest.raises(OrganiserError, match=r"data\.path"):
        require_data_consent(data(path=path), tmp_path / "data", is_allowed=True)
