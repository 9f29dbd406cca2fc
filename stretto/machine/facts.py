"""What this machine is: processor, cores, memory, versions. What was measured on it holds for nothing else."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
from importlib import metadata
from pathlib import Path

import torch

from stretto.kernels import native

PACKAGES = ("torch", "torch_geometric", "triton", "numpy", "torch_scatter", "torch_sparse", "pyg_lib")


@functools.cache
def cpu_model() -> str:
    """Name of the CPU as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        return platform.processor() or platform.machine()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes(kind: str = "MemTotal") -> int:
    """Memory of the machine; kind "MemAvailable": what may still be taken. 0 where the system does not say."""
    info = Path("/proc/meminfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith(kind + ":"):
                return int(line.split()[1]) * 1024
    return 0


def versions() -> dict[str, str]:
    """Installed versions of everything a timing depends on; absent packages are left out."""
    installed = {"python": platform.python_version(), "stretto": native._VERSION}
    for package in PACKAGES:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed


def facts() -> dict[str, object]:
    """The machine in one dictionary, as a row of results has it."""
    return {
        "cpu": cpu_model(),
        "cores": cores(),
        "memory_gib": round(memory_bytes() / 2**30, 1),
        "system": platform.platform(),
        "isa": native.isa(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }


def headline() -> str:
    """The machine in one line."""
    known = facts()
    installed = ", ".join(f"{name} {version}" for name, version in versions().items())
    return f"{known['cpu']}, {known['cores']} cores, {known['isa'] or 'no native kernels'}; {installed}"


def describe() -> dict[str, object]:
    """What a measured rate depends on: CPU, instruction set, threads, versions, and the GPU if there is one."""
    known: dict[str, object] = {
        "cpu": cpu_model(),
        "isa": native.isa(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "stretto": native._VERSION,
    }
    if torch.cuda.is_available():
        known["gpu"] = torch.cuda.get_device_name()
    return known


def key(facts: dict[str, object]) -> str:
    """A short name for a file about a machine."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
