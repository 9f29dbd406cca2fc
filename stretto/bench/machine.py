"""What a result row must say about where it was measured: machine, threads, versions."""

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

import stretto
from stretto.kernels import native
from stretto.tune.machine import cpu_model

PACKAGES = ("torch", "torch_geometric", "triton", "numpy", "torch_scatter", "torch_sparse", "pyg_lib")


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
    found = {"python": platform.python_version(), "stretto": stretto.__version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def facts() -> dict[str, object]:
    """The machine in one dictionary."""
    return {
        "cpu": cpu_model(),
        "cores": cores(),
        "memory_gib": round(memory_bytes() / 2**30, 1),
        "system": platform.platform(),
        "isa": native.isa(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }
