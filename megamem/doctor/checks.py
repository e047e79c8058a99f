"""Checks of this machine: what is installed, what it can do, what is missing and what that costs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megamem.costs.devices import device_peak
from megamem.errors import ConfigError
from megamem.hardware import amx_announced, avoid_broken_amx, cores

Status = Literal["ok", "note", "warning", "failed"]

LOW_DISK_GIB = 5.0
"""Free space below which a run's checkpoints and shards soon fill the disk."""

TRIED_WIDTH = 64
"""Width of a head, or of an MLP, with which kernels of libraries are tried; a run tries its own."""

# import name, distribution name, what is lost without it
_ACCELERATORS = [
    ("flash_attn", "flash-attn", "model.attention_kernel: flash_attn; sdpa and flex compute the same"),
    (
        "fla",
        "flash-linear-attention",
        "model.recurrence_kernel: fla, and its kernels under training.kernels: auto; torch computes the same",
    ),
    (
        "triton",
        "triton",
        "FlexAttention, torch.compile and model.deep_memory_kernel: triton on CUDA; sdpa, no compile and torch work",
    ),
    ("transformer_engine", "transformer-engine", "nothing today: FP8 layers are not supported"),
    ("apex", "apex", "nothing: torch's fused AdamW and RMSNorm are used"),
]


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    section: str
    name: str
    status: Status
    """`failed`: megamem cannot work. `warning`: it may not work well. `note`: good to know."""
    detail: str


def check_versions() -> list[Finding]:
    """Check Python and every required package against the ranges megamem was installed with."""
    found = []
    metadata = importlib.metadata.metadata("megamem")
    wanted = metadata["Requires-Python"] or ""
    fits = SpecifierSet(wanted).contains(platform.python_version(), prereleases=True)
    found.append(Finding("versions", "python", "ok" if fits else "failed", _range(platform.python_version(), wanted)))
    for line in importlib.metadata.requires("megamem") or []:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found.append(_check_requirement(requirement))
    return found


def _check_requirement(requirement: Requirement) -> Finding:
    """Check one required package."""
    specifier = str(requirement.specifier)
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return Finding("versions", requirement.name, "failed", f"not installed; needs {specifier}")
    if requirement.specifier.contains(version, prereleases=True):
        return Finding("versions", requirement.name, "ok", _range(version, specifier))
    return Finding("versions", requirement.name, "warning", f"{version} is outside of the tested range {specifier}")


def _range(version: str, specifier: str) -> str:
    """Return a version and the range it should be in, in words."""
    return f"{version} (needs {specifier})" if specifier else version


def check_imports() -> list[Finding]:
    """Check that torch, DeepSpeed and Megatron-Core really load."""
    try:
        from megamem.parallel.libraries import prepare_libraries

        prepare_libraries()
    except Exception as error:
        reason = " ".join(str(error).split())
        return [Finding("versions", "imports", "failed", f"torch, deepspeed or megatron-core: {reason}")]
    return [Finding("versions", "imports", "ok", "torch, deepspeed and megatron-core load")]


def check_cpu() -> list[Finding]:
    """Describe the processor: model, cores and how BF16 runs."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.exists() else ""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    model = fields.get("model name") or platform.processor() or platform.machine()
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    units = sorted(flags & {"avx512_bf16", "amx_bf16", "bf16"})
    bf16 = ", ".join(units) if units else "no instructions for it; slower than fp32, use training.precision fp32"
    found = [
        Finding("devices", "cpu", "ok", f"{model}, {cores()} cores usable"),
        Finding("devices", "cpu bf16", "ok" if units else "note", bf16),
    ]
    if amx_announced():
        broken = avoid_broken_amx()
        found.append(Finding("devices", "cpu amx", "warning" if broken else "ok", broken or "announced and in use"))
    return found


def check_cuda() -> list[Finding]:
    """Describe every CUDA device: memory, compute capability, BF16, peak."""
    import torch

    if not torch.cuda.is_available():
        return [Finding("devices", "cuda", "note", "no device; training runs on the CPU over gloo")]
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        peak = device_peak(properties.name, "bf16")
        parts = [
            properties.name,
            f"{properties.total_memory / 2**30:.1f} GiB",
            f"compute capability {properties.major}.{properties.minor}",
            f"{peak / 1e12:,.0f} TFLOP/s dense BF16" if peak else "peak unknown: MFU is not reported",
        ]
        bf16 = properties.major >= 8
        if not bf16:
            parts.append("no BF16: use training.precision fp32")
        found.append(Finding("devices", f"cuda:{index}", "ok" if bf16 else "warning", ", ".join(parts)))
    return found


def check_accelerators() -> list[Finding]:
    """Report optional packages, and what is lost without each."""
    found = []
    for module, package, lost in _ACCELERATORS:
        if importlib.util.find_spec(module) is None:
            found.append(Finding("optional", package, "note", f"not installed; without it: {lost}"))
            continue
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "installed, version unknown"
        found.append(Finding("optional", package, "ok", version))
    return found


def check_kernels() -> list[Finding]:
    """Report who computes what surrounds the memory, on this machine's first device: libraries are tried there."""
    import torch

    from megamem.model.kernels import OPERATIONS, RECURRENCES, choose

    cuda = torch.cuda.is_available()
    device, dtype = (torch.device("cuda:0"), torch.bfloat16) if cuda else (torch.device("cpu"), torch.float32)
    norm = "one kernel of its own" if cuda else "one kernel of its own on CUDA, several on the CPU"
    found = [Finding("kernels", "RMS norm", "ok", f"torch {torch.__version__}: {norm}")]
    for operation in (*OPERATIONS, *RECURRENCES):
        chosen = choose(operation, TRIED_WIDTH, device, dtype)
        by = f"torch {torch.__version__}" if chosen.by == "torch" else chosen.by
        failed = chosen.by == "torch" and cuda and operation.library.version is not None
        found.append(Finding("kernels", operation.name, "warning" if failed else "ok", f"{by}: {chosen.reason}"))
    return [*found, *_named_kernels()]


def _named_kernels() -> list[Finding]:
    """Report what computes the rest: by default, and where a run's configuration names something else."""
    import torch

    from megamem.ops.attention.softmax import check_backend
    from megamem.ops.deep_memory.kernels import check_kernel
    from megamem.ops.linear_cross_entropy import SLICE_BYTES

    torch_itself = f"torch {torch.__version__}"
    flash = _usable("model.attention_kernel: flash_attn", lambda: check_backend("flash_attn"))
    triton = _usable("model.deep_memory_kernel: triton", lambda: check_kernel("triton"))
    slices = f"in slices of {SLICE_BYTES >> 20} MiB of logits, together with the head"
    details = {
        "attention": f"scaled_dot_product_attention; {flash}",
        "deep memories": f"products of matrices; {triton}",
        "cross-entropy": slices,
    }
    return [Finding("kernels", name, "ok", f"{torch_itself}: {detail}") for name, detail in details.items()]


def _usable(setting: str, check: Callable[[], None]) -> str:
    """Return whether a run on this machine may have a setting; check: raises ConfigError if not."""
    try:
        check()
    except ConfigError as error:
        return str(error).partition(";")[0]
    return f"{setting} can be used"


def check_disk(folder: Path = Path()) -> list[Finding]:
    """Check the free space where runs are written."""
    free = shutil.disk_usage(folder).free / 2**30
    where = f"{free:.1f} GiB free in {folder.resolve()}"
    if free < LOW_DISK_GIB:
        return [Finding("disk", "space", "warning", f"{where}; a run needs room for weights, shards and traces")]
    return [Finding("disk", "space", "ok", where)]


def check_collectives(timeout_s: float = 120) -> list[Finding]:
    """Run the self-test of two processes: over gloo, and over NCCL where there are two devices."""
    try:
        import torch

        from megamem.parallel.self_test import SelfTestError, run_self_test
    except ImportError as error:
        return [Finding("collectives", "gloo", "failed", f"torch does not load: {error}")]
    backends = ["gloo"]
    if torch.cuda.is_available() and torch.cuda.device_count() >= 2:
        backends.append("nccl")
    found = []
    for backend in backends:
        try:
            timings = run_self_test(backend, timeout_s)
        except (SelfTestError, OSError) as error:
            found.append(Finding("collectives", backend, "failed", f"two processes: {error}"))
            continue
        shown = ", ".join(f"{name} {milliseconds:.2f} ms" for name, milliseconds in timings.items())
        found.append(Finding("collectives", backend, "ok", f"two processes, 1 MiB: {shown}"))
    return found


def examine() -> list[Finding]:
    """Run every check, in order; without torch only those that do not need it."""
    found = [*check_versions(), *check_imports()]
    if importlib.util.find_spec("torch") is not None:
        found += [*check_cuda(), *check_kernels()]
    return [*found, *check_cpu(), *check_accelerators(), *check_disk(), *check_collectives()]


def healthy(findings: Iterable[Finding]) -> bool:
    """Return whether nothing failed."""
    return all(finding.status != "failed" for finding in findings)
