"""Which device is taken."""

import pytest
import torch

from node.trainer.device import autocast_context, choose_device, device_name
from protocol.errors import DeviceError


@pytest.mark.parametrize(("present", "taken"), [(True, "cuda"), (False, "cpu")])
def test_auto_takes_what_is_there(monkeypatch: pytest.MonkeyPatch, present: bool, taken: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: present)
    assert choose_device("auto").type == taken
    assert choose_device("cpu").type == "cpu"


def test_a_missing_accelerator_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="use --device cpu"):
        choose_device("cuda")


def test_a_processor_computes_in_fp32() -> None:
    device = torch.device("cpu")
    assert device_name(device) == "cpu"
    with autocast_context(device):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
