"""Memory that an op takes for itself on the CPU and gives back before it returns: some of our kernels, and casts.

Counted from what a trace keeps of the arguments, so that it is known for other sizes too (`lift.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stretto.kernels.attention import TENSORS
from stretto.kernels.cpu_attention import ROWS_PER_TASK
from stretto.kernels.schema import accumulate_type
from stretto.observe.specs import Matrix, Size, Spec

Described = dict[str, Any]  # an Attention: "form", and a Spec or None for every tensor


def scratch_bytes(kernel: str, args: tuple[Any, ...]) -> Size:
    """By the kernel's name, as kernel_costs.KERNELS has it, and its arguments as `describe` leaves them."""
    result = SCRATCH.get(kernel.removeprefix("stretto::"))
    return 0 if result is None else result(*args)


ARITHMETIC = ("add", "sub", "rsub", "mul", "div")


def cast_bytes(name: str, inputs: list[Spec], outputs: list[Spec]) -> Size:
    """Of an ATen op between types: torch first copies every operand that is not of the common type.

    The gradient of a maximum multiplies a mask over all messages by their gradients.
    """
    if name.partition("::")[2].split(".")[0].rstrip("_") not in ARITHMETIC or not outputs:
        return 0
    common = outputs[0].dtype
    return sum(spec.numel * common.itemsize for spec in inputs if spec.dtype != common and spec.shape)


def _attention(csr: Matrix, a: Described, *_: Any) -> Size:
    """Numbers per node, edge or head are read in one piece, in the type of the sums."""
    names = ("att",) if a["form"] in ("gatv2", "dot") else ("att", "left", "right", "edge")
    acc = accumulate_type(_values(a).dtype)
    numbers = [t for t in (a[name] for name in names) if t is not None]
    return sum(t.numel * acc.itemsize for t in numbers if t.dtype != acc or not _in_one_piece(t))


def _attention_grad(csr: Matrix, csr_t: Matrix, a: Described, *rest: Any) -> Size:
    """The row sums of the softmax, d score where it is summed by destination and is no gradient itself, and the parts
    of a bias's gradient."""
    need = dict(zip((*TENSORS, "bias"), rest[-1], strict=False))
    values = _values(a)
    of_edge = a["edge"] is not None and a["form"] not in ("gatv2", "dot") and need["edge"]
    row_sum = csr.num_rows if a["form"] != "weight" else 0
    dscore = csr.num_edges if (need["left"] or need["query"]) and not of_edge else 0
    parts = -(-csr.num_rows // ROWS_PER_TASK) * values.shape[2] if need.get("bias") else 0
    heads = next((a[name].shape[1] for name in ("left", "edge") if a[name] is not None), values.shape[1])
    return _attention(csr, a) + (row_sum + dscore + parts) * heads * accumulate_type(values.dtype).itemsize


def _values(a: Described) -> Spec:
    result = a["right"] if a["v"] is None else a["v"]
    assert isinstance(result, Spec)
    return result


def _in_one_piece(t: Spec) -> bool:
    """Whether it is contiguous. Strides are those of the trace, also where the first size is another by now."""
    step = 1
    for size, stride in zip(reversed(t.shape), reversed(t.stride), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


SCRATCH: dict[str, Callable[..., Size]] = {"attention": _attention, "attention_grad": _attention_grad}
