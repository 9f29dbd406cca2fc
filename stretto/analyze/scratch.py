"""Memory that one of our kernels takes for itself on the CPU and gives back before it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stretto.kernels.attention import TENSORS, Attention
from stretto.kernels.cpu_attention import ROWS_PER_TASK
from stretto.kernels.schema import accumulate_type


def scratch_bytes(kernel: str, args: tuple[Any, ...]) -> int:
    """By the kernel's name, as kernel_costs.KERNELS has it, and its arguments."""
    found = SCRATCH.get(kernel.removeprefix("stretto::"))
    return 0 if found is None else found(*args)


def _attention(csr: Any, a: Attention, *_: Any) -> int:
    """Numbers per node, edge or head are read in one piece, in the type of the sums."""
    if a.values.device.type != "cpu":
        return 0
    rows = a.form in ("gatv2", "dot")
    numbers = [a.att] if rows else [a.att, a.left, a.right, a.edge]
    acc = accumulate_type(a.values.dtype)
    return sum(t.numel() * acc.itemsize for t in numbers if t is not None and (t.dtype != acc or not t.is_contiguous()))


def _attention_grad(csr: Any, csr_t: Any, a: Attention, *rest: Any) -> int:
    """The row sums of the softmax, d score where it is summed by destination and is no gradient itself, and the parts
    of a bias's gradient."""
    if a.values.device.type != "cpu":
        return 0
    need = dict(zip((*TENSORS, "bias"), rest[-1], strict=False))
    item = accumulate_type(a.values.dtype).itemsize
    of_edge = a.edge is not None and a.form not in ("gatv2", "dot") and need["edge"]
    row_sum = csr.num_rows if a.form != "weight" else 0
    dscore = csr.num_edges if (need["left"] or need["query"]) and not of_edge else 0
    parts = -(-csr.num_rows // ROWS_PER_TASK) * a.values.size(2) if need.get("bias") else 0
    return _attention(csr, a) + (row_sum + dscore + parts) * a.heads * item


SCRATCH: dict[str, Callable[..., int]] = {"attention": _attention, "attention_grad": _attention_grad}
