"""The device of a trainer and the limit on its memory."""

import importlib
import resource
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import psutil
import torch

from node.from_manifest import build_node_program, in_memory_mode
from node.model import smallest_cut
from node.model.memory_estimate import fit_microbatch
from node.model.products import has_bf16, has_fp8, require_fp8_sizes
from node.monitoring.status import DeviceUse
from node.options import Device, NodeOptions, TrainerOptions
from node.trainer.devices.pause_when_busy import usage_meter_for
from node.trainer.ipc.shared_memory import SharedLayout
from node.units import format_bytes, format_count
from optim.round_plan import RoundPlanner
from protocol.errors import DeviceError, MurmurError
from protocol.manifest.run import Manifest

MAX_CLASS_CHARACTERS = 96
BF16_RULES = ("adamw", "adamw-8bit", "quasi-hyperbolic")  # in parts, at the weights themselves
DEFAULT_OPTIONS = TrainerOptions()
UNUSED_MEMORY_BYTES = 256 << 20  # allocated but never touched, such as the stacks of threads


def choose_devices(options: TrainerOptions) -> tuple[torch.device, ...]:
    """Choose the devices that train together, a rank on each. Raises DeviceError if one is missing."""
    cards = max(1, torch.cuda.device_count()) if torch.cuda.is_available() else 0
    if options.device == "all":
        names = tuple(f"cuda:{number}" for number in range(cards)) or ("cuda",)
    else:
        names = options.devices or (options.device,)
    return tuple(_find_device(name, cards) for name in names)


def choose_device(requested: Device) -> torch.device:
    """Choose one device; `auto` prefers an accelerator. Raises DeviceError if it is missing."""
    return choose_devices(TrainerOptions(device=requested))[0]


def _find_device(name: str, cards: int) -> torch.device:
    if name == "cpu" or (name == "auto" and not cards):
        return torch.device("cpu")
    if name == "mps":
        if not torch.backends.mps.is_available():
            raise DeviceError("no MPS device here, which Apple silicon has; use --device cpu")
        return torch.device("mps")
    if not cards:
        raise DeviceError("no CUDA device here; use --device cpu, or install the driver and a CUDA build of torch")
    kind, _, number = name.partition(":")
    if kind == "auto" or not number:
        return torch.device("cuda")
    if int(number) >= cards:
        there = ", ".join(f"cuda:{card}" for card in range(cards))
        raise DeviceError(f"there is no {name} here; this machine has {there}")
    return torch.device(name)


def device_name(device: torch.device) -> str:
    """Return a name for people: the accelerator's, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def count_names(names: Iterable[str]) -> str:
    """Return names, each once, with the number of equal ones."""
    counts = Counter(names)
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())


def device_class(
    device: torch.device, is_compiled: bool = False, ranks: int = 1, options: TrainerOptions = DEFAULT_OPTIONS
) -> str:
    """Return the kind of device, on all of which an inner step has the same bits.

    A step that is compiled, made by several ranks, rounded or in fp8 has other bits than a plain one, and no auditor
    repeats it.
    """
    if device.type == "cuda":
        kind = f"cuda {torch.cuda.get_device_name(device)}"
    elif device.type == "mps":
        kind = "mps"
    else:
        kind = f"cpu {_cpu_vendor()} {torch.backends.cpu.get_cpu_capability()}"
    way = ("compiled " if is_compiled else "") + (f"{ranks} ranks " if ranks > 1 else "")
    way += "" if options.weights == "fp32" else f"{options.weights} "
    way += "fp8 " if options.fp8 else ""
    return f"{way}{kind} torch {torch.__version__}"[:MAX_CLASS_CHARACTERS]


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


def add_device_uses(uses: Sequence[DeviceUse]) -> DeviceUse | None:
    """Return the use of several accelerators together; None without any."""
    if not uses:
        return None
    shares = [use.share for use in uses if use.share is not None]
    return DeviceUse(
        share=sum(shares) / len(shares) if shares else None,
        memory=sum(use.memory for use in uses),
        memory_total=sum(use.memory_total for use in uses),
    )


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
    devices, manifest = choose_devices(settings), settings.manifest
    device = devices[0]
    planner = build_node_program(manifest, settings.memory_mode, own_loop=settings.own_loop, cut=smallest_cut(manifest))
    _require_memory(planner, total_memory())
    if device.type == "mps":
        require_fp32_sums(manifest)
    if len(devices) > 1 or settings.site is not None:
        if settings.own_loop:
            raise DeviceError("--own-loop: your loop chooses its devices; leave out --device, --devices and --site")
        require_ranks(manifest, planner)
    if settings.weights == "bf16":
        if settings.site is not None:
            raise DeviceError("--weights bf16 trains a whole model on one card; leave it or --site out")
        require_bf16_weights(manifest, planner, devices)
    if settings.fp8:
        if settings.own_loop:
            raise DeviceError("--own-loop: your loop chooses the types of its products; leave out --fp8")
        require_fp8(manifest, devices)
    held = in_memory_mode(manifest, settings.memory_mode)
    fit_microbatch(held, settings.memory, device.type, settings.recompute, len(devices))
    if settings.pause_when_busy:
        usage_meter_for(device)


def require_fp32_sums(manifest: Manifest) -> None:
    """Raise DeviceError if a run adds up in fp64, which the graphics of Apple silicon lack."""
    if manifest.pipeline.is_cut or manifest.rl is not None:
        kind = "a stage of a pipeline" if manifest.pipeline.is_cut else "reinforcement learning"
        raise DeviceError(f"{kind} adds up in fp64, which mps lacks; use --device cpu")


def require_bf16_weights(manifest: Manifest, planner: RoundPlanner, devices: Sequence[torch.device]) -> None:
    """Raise DeviceError if weights in bf16 cannot train this run."""
    if devices[0].type != "cuda":
        raise DeviceError("--weights bf16 is for a card, because a CPU trains what the daemon reads; leave it out")
    if not has_bf16(devices[0]):
        raise DeviceError(f"--weights bf16: {device_name(devices[0])} has no bf16; leave it out")
    if len(devices) > 1 or manifest.pipeline.is_cut:
        raise DeviceError("--weights bf16 trains a whole model on one card; leave it out, or use --device cuda:0")
    inner = planner.method.inner
    if inner.kind not in BF16_RULES:
        raise DeviceError(
            f"--weights bf16 needs one of the inner optimizers {', '.join(BF16_RULES)}, and this run has {inner.kind}; "
            "leave it out"
        )


def require_fp8(manifest: Manifest, devices: Sequence[torch.device]) -> None:
    """Raise DeviceError if the devices or the model have no products in fp8."""
    for device in devices:
        if not has_fp8(device):
            raise DeviceError(
                f"--fp8 needs an NVIDIA card from 2022 on, and {device_name(device)} is none; leave it out"
            )
    require_fp8_sizes(manifest.model)


def require_ranks(manifest: Manifest, planner: RoundPlanner) -> None:
    """Raise DeviceError if several devices cannot train this run together."""
    inner = planner.method.inner
    if manifest.pipeline.is_cut:
        raise DeviceError("a stage of a pipeline trains on one device; use --device cuda:0, and a node for each stage")
    if planner.method.has_small_memory:
        raise DeviceError("--memory-mode small trains on one device; use --device cuda:0, or --memory-mode normal")
    if not (inner.is_elementwise or inner.is_per_tensor):
        raise DeviceError(
            f"the inner optimizer {inner.kind!r} needs the whole gradient, of which several devices hold parts; use "
            "one device (--device cuda:0)"
        )


def _require_memory(planner: RoundPlanner, total_bytes: int) -> None:
    """Raise DeviceError if not even the memory that daemon and trainer share fits into this machine."""
    needed, parameters = SharedLayout.of(planner).total_bytes, planner.numel
    if needed > total_bytes:
        raise DeviceError(
            f"the model has {format_count(parameters)} parameters and needs at least {format_bytes(needed)}, but this "
            f"machine has {format_bytes(total_bytes)} of memory; use a larger machine, or a smaller model"
        )


def total_memory() -> int:
    """Return the bytes of this machine's memory and swap space."""
    return int(psutil.virtual_memory().total + psutil.swap_memory().total)


def limit_memory(max_bytes: int | None, device: torch.device) -> None:
    """Make allocations that exceed `max_bytes` in this process fail from now on; `None` means no limit."""
    if max_bytes is None:
        return
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, max_bytes / total), device)
    elif device.type == "mps":
        torch.mps.set_per_process_memory_fraction(min(1.0, max_bytes / torch.mps.recommended_max_memory()))
    else:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = max_bytes + UNUSED_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


class MicrobatchTooLarge(Exception):  # noqa: N818
    """The memory of a rank ran out, and smaller microbatches may fit: all ranks must start again with these."""


def is_out_of_memory(error: Exception) -> bool:
    """Return whether memory ran out; on a CPU only the text of torch's RuntimeError shows it."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def exit_code_of(error: Exception) -> int:
    """Return the exit code for an unexpected error: that of DeviceError if the device or its memory is the cause."""
    kinds = torch.AcceleratorError | MicrobatchTooLarge
    is_of_device = is_out_of_memory(error) or isinstance(error, kinds) or "CUDA" in str(error)
    return DeviceError.exit_code if is_of_device else MurmurError.exit_code


def uses_bf16(device: torch.device) -> bool:
    """Return whether matrix products run in bf16, in which ranks then gather the matrices of layers."""
    return device.type == "cuda" and has_bf16(device)


def describe_missing_bf16(device: torch.device) -> str:
    """Return why a card is slower than it could be, for a person; empty if it is not."""
    if device.type != "cuda" or has_bf16(device):
        return ""
    return f"{device_name(device)} has no bf16: training in fp32, more slowly; cards from 2020 on have it"


def autocast_context(device: torch.device) -> AbstractContextManager[object]:
    """Return a context with bf16 matrix products on an accelerator that has them, and fp32 ones elsewhere."""
    return torch.autocast("cuda", torch.bfloat16) if uses_bf16(device) else nullcontext()
