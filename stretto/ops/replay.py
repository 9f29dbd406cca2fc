"""Random numbers drawn once more, for a backward pass that computes its forward again, and seeds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from stretto.kernels import has_own_memory


class Replay:
    """The state of torch's generators, of the CPU and of the devices of `tensors`, when this was made.

    Inside `with replay:` they start from there; afterwards they are where they were. Inside a CUDA graph that is being
    captured a device's state cannot be read: then only the CPU's is kept.
    """

    def __init__(self, tensors: Iterable[Tensor | None]) -> None:
        self.cpu = torch.get_rng_state()
        self.devices: list[int] = []
        self.states: list[Tensor] = []
        on_device = [t for t in tensors if t is not None and has_own_memory(t.device)]
        if on_device and not torch.cuda.is_current_stream_capturing():
            self.devices, self.states = get_device_states(*on_device)

    def __enter__(self) -> None:
        self.fork: Any = torch.random.fork_rng(devices=self.devices)
        self.fork.__enter__()
        torch.set_rng_state(self.cpu)
        set_device_states(self.devices, self.states)

    def __exit__(self, *error: Any) -> None:
        self.fork.__exit__(*error)


def mixed(seed: int) -> int:
    """64 well-mixed bits (the finaliser of SplitMix64), so that seeds that are close give masks that are not."""
    x = (seed + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)
