"""Which device a trainer computes on, and how much of its memory it may take."""

import resource
from contextlib import AbstractContextManager, nullcontext

import torch

from node.model.memory_estimate import fit_microbatch
from node.options import Device, NodeOptions
from node.trainer.pause_when_busy import usage_meter_for
from protocol.errors import DeviceError

UNUSED_MEMORY_BYTES = 256 << 20  # what a process has asked for and does not use, such as the stacks of its threads


def choose_device(requested: Device) -> torch.device:
    """`auto` takes the accelerator where there is one. Raises DeviceError when `cuda` is asked for and missing."""
    present = torch.cuda.is_available()
    if requested == "cuda" and not present:
        raise DeviceError("no CUDA device here; use --device cpu, or install the driver and a CUDA build of torch")
    return torch.device("cuda" if present and requested != "cpu" else "cpu")


def device_name(device: torch.device) -> str:
    """For people: the accelerator's name, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def require_usable_device(settings: NodeOptions) -> None:
    """Raises DeviceError, before anything is started, where the device or the allowed memory will not do."""
    device = choose_device(settings.device)
    fit_microbatch(settings.manifest, settings.memory, device.type)
    if settings.pause_when_busy:
        usage_meter_for(device)


def limit_memory(max_bytes: int | None, device: torch.device) -> None:
    """From here on an allocation that would take this process above so many bytes fails."""
    if max_bytes is None:
        return
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, max_bytes / total), device)
    else:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = max_bytes + UNUSED_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def is_out_of_memory(error: Exception) -> bool:
    """Torch says so in the words of a RuntimeError where there is no accelerator."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def autocast_context(device: torch.device) -> AbstractContextManager[object]:
    """bf16 matrix products where the hardware is made for them; fp32 on a processor."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
