"""The use of an accelerator, with a driver that answers, refuses or is missing."""

import sys
from types import SimpleNamespace

import pytest
import torch

from node.trainer.devices.device import measure_device_use

CUDA = torch.device("cuda", 0)


class DriverError(Exception):
    pass


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 40))
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 93)
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=DriverError))


def test_processor_has_no_use_of_an_accelerator() -> None:
    assert measure_device_use(torch.device("cpu")) is None


def test_driver_gives_memory_and_share() -> None:
    found = measure_device_use(CUDA)
    assert found is not None and (found.share, found.memory, found.memory_total) == (0.93, 30, 40)


@pytest.mark.parametrize("error", [DriverError("not supported"), RuntimeError("no driver")])
def test_driver_that_refuses_leaves_the_share_unknown(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(device: torch.device) -> int:
        raise error

    monkeypatch.setattr(torch.cuda, "utilization", refuse)
    found = measure_device_use(CUDA)
    assert found is not None and (found.share, found.memory) == (None, 30)


def test_without_its_package_the_share_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it fails
    found = measure_device_use(CUDA)
    assert found is not None and found.share is None
