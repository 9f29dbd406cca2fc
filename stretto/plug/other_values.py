"""Whether a step that was written down (bound.py) computes what its layer does, tried on values it has not seen.

What a program must not hold, values of the one call it was written from, shows where they differ. Nothing of the user's
is touched: the layer is copied with parameters and buffers of its own, and his random numbers stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stretto.layers.layer import Conv
from stretto.ops.program import Program
from stretto.ops.program_step import step as run_step

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def same_on_other_values(
    conv: Conv,
    program: Program,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[Tensor],
    own: list[Tensor],
    long: Callable[..., Any],
) -> bool:
    """Whether the program computes what the layer does by its long way, with other values of all that it reads.

    tensors: those among the arguments; own: parameters and buffers of the layer.
    """
    fixed = {id(t) for t, _, _ in program.looked_at}
    with torch.random.fork_rng(devices=[]):
        others = {id(t): _twin(t) if id(t) in fixed else _other(t) for t in (*tensors, *own)}
    copy = _copied(conv, others)
    ours = [_twin(others[id(t)]) for t in (*tensors, *own)]
    theirs = [others[id(t)] for t in (*tensors, *own)]

    def given(value: Any) -> Any:
        return tuple(map(given, value)) if type(value) is tuple else others.get(id(value), value)

    results = []
    with torch.random.fork_rng(devices=[]):
        runs: tuple[tuple[Callable[[], Any], list[Tensor]], ...] = (
            (lambda: long(copy, *map(given, args), **{k: given(v) for k, v in kwargs.items()}), theirs),
            (lambda: run_step(program, None, *ours), ours),
        )
        for run, inputs in runs:
            torch.manual_seed(0)
            out = run()
            wanted = [t for t in inputs if t.requires_grad]
            flow = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)
            found = torch.autograd.grad(out, wanted, flow, allow_unused=True) if out.requires_grad else ()
            results.append([out, *found, *[t for t in inputs if not t.requires_grad]])
    return all(_close(a, b) for a, b in zip(*results, strict=True))


def _other(t: Tensor) -> Tensor:
    """Other values of the same kind, a little larger: what is positive stays so."""
    if not t.is_floating_point():
        return t.detach().clone()
    other = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
    other.copy_(t.detach() * (1 + 0.5 * torch.rand_like(t)) + 0.01 * torch.rand_like(t))
    return other.requires_grad_(t.requires_grad)


def _twin(t: Tensor) -> Tensor:
    twin = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t.detach())
    return twin.requires_grad_(t.requires_grad)


def _copied(module: Any, others: dict[int, Tensor]) -> Any:
    """A module like this one with other parameters and buffers; what PyG does when one is copied is not wanted."""
    copy = object.__new__(type(module))
    copy.__dict__.update(vars(module))
    for number, parameter in [(id(t), t) for t in module._parameters.values() if t is not None]:
        others[number] = nn.Parameter(others[number].detach(), parameter.requires_grad)
    for name in ("_parameters", "_buffers"):
        table = vars(module)[name]
        copy.__dict__[name] = {k: None if t is None else others[id(t)] for k, t in table.items()}
    copy.__dict__["_modules"] = {k: None if m is None else _copied(m, others) for k, m in module._modules.items()}
    return copy


def _close(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if not a.is_floating_point():
        return torch.equal(a, b)
    limit = TOLERANCE.get(a.dtype, 3e-2)
    return bool((a - b).double().norm() <= limit * (b.double().norm() + 1e-12))
