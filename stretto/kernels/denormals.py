"""Numbers too small for a full mantissa (below 1.2e-38 in fp32) are taken for zero while our dense products run.

The processor handles such numbers many times slower than others, and the gradient of a softmax that has made up
its mind consists of them. Our own kernels see to it themselves (csrc/core/denormals.h); torch's GEMM runs on threads
of the same pool, whose mode is set before it and put back after it. What the user's own code computes is not touched.
"""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor

from stretto import settings
from stretto.kernels import native

LEAST = 1 << 16  # values; a smaller product takes no longer than to tell the threads


class DenormalsAreZero:
    """While open, the threads of this thread's pool take them for zero."""

    def __init__(self) -> None:
        self.threads = 0

    def __enter__(self) -> None:
        self.threads = torch.get_num_threads()
        native.call("stretto_flush_denormals", 1, self.threads)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        native.call("stretto_flush_denormals", 0, self.threads)


def matter(x: Tensor) -> bool:
    """Whether a product with x may be slow for them: on the CPU, large, of a type that has them and is computed in."""
    return (
        x.device.type == "cpu"
        and x.numel() >= LEAST
        and x.dtype in (torch.float32, torch.float64)
        and native.library() is not None
        and not settings.torch_kernels()
    )
