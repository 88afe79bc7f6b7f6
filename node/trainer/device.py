"""The device of a trainer and the limit on its memory."""

import importlib
import os
import resource
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import torch

from node.ipc.channel import DeviceUse
from node.model import shape_table, smallest_cut
from node.model.memory_estimate import fit_microbatch
from node.options import Device, NodeOptions
from node.trainer.pause_when_busy import usage_meter_for
from node.units import format_bytes, format_count
from protocol.errors import DeviceError, MurmurError

ANCHOR_BYTES_PER_PARAMETER = 8  # fp32, in two buffers
MAX_CLASS_CHARACTERS = 96
UNUSED_MEMORY_BYTES = 256 << 20  # allocated but never touched, such as the stacks of threads


def choose_device(requested: Device) -> torch.device:
    """Choose the device; `auto` prefers an accelerator. Raises DeviceError if a requested one is missing."""
    present = torch.cuda.is_available()
    if requested == "cuda" and not present:
        raise DeviceError("no CUDA device here; use --device cpu, or install the driver and a CUDA build of torch")
    return torch.device("cuda" if present and requested != "cpu" else "cpu")


def device_name(device: torch.device) -> str:
    """Return a name for people: the accelerator's, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def device_class(device: torch.device) -> str:
    """Return the kind of device, on all of which an inner step has the same bits."""
    if device.type == "cuda":
        kind = f"cuda {torch.cuda.get_device_name(device)}"
    else:
        kind = f"cpu {_cpu_vendor()} {torch.backends.cpu.get_cpu_capability()}"
    return f"{kind} torch {torch.__version__}"[:MAX_CLASS_CHARACTERS]


def _cpu_vendor() -> str:
    """Return the maker of the CPU, for which the libraries of torch choose their kernels; empty if unknown."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("vendor_id", "CPU implementer")):
                return line.rpartition(":")[2].strip()
    return ""


def measure_device_use(device: torch.device) -> DeviceUse | None:
    """Return the use of an accelerator by all programs; None for a CPU.

    Its share of the time needs NVIDIA's package `nvidia-ml-py`, through which torch asks the driver.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return DeviceUse(share=_busy_share(device), memory=total - free, memory_total=total)


def _busy_share(device: torch.device) -> float | None:
    """Return the share of the last second in which the accelerator computed; None if the driver does not say."""
    try:
        driver = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        return min(1.0, torch.cuda.utilization(device) / 100)
    except (RuntimeError, driver.NVMLError):
        return None  # for example a part of an accelerator (MIG)


def require_usable_device(settings: NodeOptions) -> None:
    """Raise DeviceError if the device is missing or the memory too small, before anything starts."""
    device = choose_device(settings.device)
    manifest = settings.manifest
    _require_memory(shape_table(manifest.model, smallest_cut(manifest)).numel, total_memory())
    fit_microbatch(manifest, settings.memory, device.type)
    if settings.pause_when_busy:
        usage_meter_for(device)


def _require_memory(parameters: int, total_bytes: int) -> None:
    """Raise DeviceError if even the two anchors do not fit into this machine's memory."""
    needed = parameters * ANCHOR_BYTES_PER_PARAMETER
    if needed > total_bytes:
        raise DeviceError(
            f"the model has {format_count(parameters)} parameters and needs at least {format_bytes(needed)}, but this "
            f"machine has {format_bytes(total_bytes)} of memory; use a larger machine, or a smaller model"
        )


def total_memory() -> int:
    """Return the bytes of this machine's memory and swap space."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError):  # without /proc, the swap space is not known
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("SwapTotal:"):
                return pages + int(line.split()[1]) * 1024
    return pages


def limit_memory(max_bytes: int | None, device: torch.device) -> None:
    """Make allocations that exceed `max_bytes` in this process fail from now on; `None` means no limit."""
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
    """Return whether memory ran out; on a CPU only the text of torch's RuntimeError shows it."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def exit_code_of(error: Exception) -> int:
    """Return the exit code for an unexpected error: that of DeviceError if the device or its memory is the cause."""
    is_of_device = is_out_of_memory(error) or isinstance(error, torch.AcceleratorError) or "CUDA" in str(error)
    return DeviceError.exit_code if is_of_device else MurmurError.exit_code


def autocast_context(device: torch.device) -> AbstractContextManager[object]:
    """Return a context with bf16 matrix products on an accelerator and fp32 ones on a CPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
