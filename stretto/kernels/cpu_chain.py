"""Chains of Linears and activations over few rows on the CPU: one call into libstretto each way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.kernels import abi, native
from stretto.kernels.schema import CPU, DTYPES

WIDEST = 256  # values in a row
BLOCK, MOST_TASKS = 64, 8  # rows that go through a chain together; shares of the weights' gradients
KINDS = {"dense": 0, "relu": 1, "softplus": 2, "scale": 3}  # stretto_stage_kind of csrc/abi.h
STAGE = abi.packer(abi.STAGE)

# ("dense", whether it has a bias), ("relu", None), ("softplus", shift), ("scale", None); a Linear has a weight [o, i]
# and maybe a bias [o] among the tensors, a scale one factor for each row [n].
Stage = tuple[str, Any]


def chain(stages: Sequence[Stage], rows: Tensor, tensors: Sequence[Tensor], kept: list[Tensor]) -> Tensor:
    """The chain's result; kept gets one tensor a stage, what backward needs. rows [n, i] -> [n, o]."""
    if not stages:
        return rows
    rows = rows.contiguous()
    n, width = rows.shape
    first, packed, at, weights = rows, [], 0, 0
    for name, detail in stages:
        weight = bias = 0
        to = rows
        if name == "dense":
            kept.append(rows)
            weight = tensors[at].data_ptr()
            if detail:
                bias = tensors[at + 1].data_ptr()
            weights += tensors[at].numel()
            width = tensors[at].size(0)
            at += 1 + detail
            to = torch.empty(n, width, dtype=rows.dtype, device=CPU)
        elif name == "relu":
            to = torch.empty_like(rows) if rows is first else rows
            kept.append(to)
        elif name == "softplus":
            kept.append(rows)
            to = torch.empty_like(rows)
        else:  # overwritten, unless somebody else has it
            to = torch.empty_like(rows) if rows is first or any(rows is t for t in kept) else rows
            weight = tensors[at].data_ptr()
            kept.append(tensors[at])
            at += 1
        shift = detail if name == "softplus" else 0.0
        packed.append(STAGE.pack(KINDS[name], width, weight, bias, shift, to.data_ptr(), 0, 0))
        rows = to
    scratch = torch.empty(weights, dtype=first.dtype, device=CPU)
    whole = b"".join(packed), len(stages), scratch
    native.kernel("stretto_chain", DTYPES[first.dtype], first, n, first.size(1), *whole)
    return rows


def chain_grad(
    stages: Sequence[Stage],
    kept: Sequence[Tensor],
    tensors: Sequence[Tensor],
    grad: Tensor,
    needs: Sequence[bool],
    need_rows: bool,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients of the chain's argument and of its tensors, those that are needed. grad [n, o]; kept: by chain."""
    found: list[Tensor | None] = [None] * len(tensors)
    if not stages:
        return grad if need_rows else None, found
    if not (need_rows or any(needs)):
        return None, found
    n, dtype = grad.size(0), grad.dtype
    grad = grad.contiguous()
    width = kept[0].size(1)
    packed, at, size, i = [], 0, 0, width
    for (name, detail), saved in zip(stages, kept, strict=True):
        weight = bias = dweight = dbias = 0
        if name == "dense":
            matrix = tensors[at]
            weight, width = matrix.data_ptr(), matrix.size(0)
            size += matrix.numel() + width
            if needs[at]:
                made = found[at] = torch.empty_like(matrix, memory_format=torch.contiguous_format)
                dweight = made.data_ptr()
            if detail and needs[at + 1]:
                made = found[at + 1] = torch.empty(width, dtype=dtype, device=CPU)
                dbias = made.data_ptr()
            at += 1 + detail
        elif name == "scale":
            weight = saved.data_ptr()
            at += 1
        shift = detail if name == "softplus" else 0.0
        packed.append(STAGE.pack(KINDS[name], width, weight, bias, shift, saved.data_ptr(), dweight, dbias))
    blocks = -(-n // BLOCK)
    tasks = -(-blocks // -(-blocks // MOST_TASKS))
    drows = torch.empty(n, i, dtype=dtype, device=CPU) if need_rows else None
    scratch = torch.empty(max(tasks * size, 1), dtype=dtype, device=CPU)
    whole = b"".join(packed), len(stages)
    native.kernel("stretto_chain_grad", DTYPES[dtype], grad, n, i, *whole, drows, scratch, tasks)
    return drows, found
