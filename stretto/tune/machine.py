"""What identifies this machine to the tuner: results measured here hold only for the same CPU, threads and versions."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from pathlib import Path

import torch

from stretto.kernels import native


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


def describe() -> dict[str, object]:
    """CPU model, instruction set, threads, versions, and the GPU if there is one."""
    facts: dict[str, object] = {
        "cpu": cpu_model(),
        "isa": native.isa(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "stretto": native._VERSION,
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def key(facts: dict[str, object]) -> str:
    """A short name for a file about a machine."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
