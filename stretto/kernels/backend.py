"""Who runs kernels: the functions, and what callers ask before they choose a way."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

from torch import Tensor

from stretto.kernels import (
    cpu,
    cpu_attention,
    cpu_edge,
    cpu_statistics,
    reference,
    reference_attention,
    reference_edge,
    reference_statistics,
    vendor,
)
from stretto.kernels.csr import Csr


@dataclass(eq=False)
class Backend:
    """Kernels, tensors in and tensors out: where a backend has none of its own, the reference's."""

    name: str
    variants: str = ""  # whose variants the tuner tries (ops/variants.py); nothing: there is one way only
    native: bool = False  # libstretto: chains, pairs and packed rows are taken to it directly
    device_seed: bool = False  # a dropout's seed is read where it lies, and nobody waits for it
    bias_width: int = 0  # columns of a head up to which `attention` adds a bias on the way

    spmm: Callable[..., tuple[Tensor, Tensor | None]] = reference.spmm
    spmm_extremum_grad: Callable[..., tuple[Tensor | None, Tensor | None]] = reference.spmm_extremum_grad
    sddmm: Callable[[Csr, Tensor, Tensor], Tensor] = reference.sddmm
    sddmm_add: Callable[[Csr, Tensor, Tensor], Tensor] = reference.sddmm_add
    edge_softmax: Callable[[Csr, Tensor], Tensor] = reference.edge_softmax
    edge_softmax_grad: Callable[[Csr, Tensor, Tensor], Tensor] = reference.edge_softmax_grad
    mul_grad: Callable[[Csr, Tensor, Tensor], Tensor] = reference.mul_grad
    gather_rows: Callable[[Tensor, Tensor], Tensor] = reference.gather_rows
    segment_matmul: Callable[..., Tensor] = reference.segment_matmul
    attention: Callable[..., tuple[Tensor, Tensor | None, Tensor | None, Tensor]] = reference_attention.attention
    attention_grad: Callable[..., tuple[Tensor | None, ...]] = reference_attention.attention_grad
    edge_messages: Callable[..., Tensor] = reference_edge.edge_messages
    edge_messages_grad: Callable[..., Any] = reference_edge.edge_messages_grad
    softmax_sum: Callable[..., tuple[Tensor, Tensor, Tensor]] = reference_edge.softmax_sum
    softmax_sum_grad: Callable[..., Any] = reference_edge.softmax_sum_grad
    statistics: Callable[..., Tensor] = reference_statistics.statistics
    statistics_grad: Callable[..., Any] = reference_statistics.statistics_grad

    # None: left to torch.
    product: Any = None  # and the following two: dense products on tensor cores
    transposed_product: Any = None
    column_sum: Any = None
    short_rows: Any = None  # called with a matrix that is known to have no long rows
    attention_layer: Any = None  # the module of whole layers of attention
    tape: Any = None  # the module of launches recorded once and played again

    @staticmethod
    def of(name: str, *modules: ModuleType, **options: Any) -> Backend:
        """The backend whose kernels are the functions of these modules, by name."""
        names = {field.name for field in fields(Backend)}
        kernels: dict[str, Any] = {
            k: f for m in modules for k, f in vars(m).items() if k in names and inspect.isfunction(f)
        }
        return Backend(name, **kernels, **options)


REFERENCE = Backend("reference")
VENDOR = Backend.of("torch", vendor)
NATIVE = Backend.of(
    "native", cpu, cpu_attention, cpu_edge, cpu_statistics, variants="cpu", native=True, bias_width=1 << 30
)
