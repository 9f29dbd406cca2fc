"""Sizes are run-time values: what a launch would be compiled for does not depend on them.

The interpreter compiles nothing, so this looks at what the compiler would see: constants, types, and for arguments that
may be specialised also divisibility by 16 and equality to 1.
"""

import importlib
import pkgutil

import pytest
import torch

from stretto.kernels import build
from stretto.kernels.attention import Attention
from stretto.kernels.csr import Csr


def launches(monkeypatch: pytest.MonkeyPatch) -> set[tuple]:
    """From now on, the distinct signatures of every launch."""
    seen: set[tuple] = set()
    package = importlib.import_module("stretto.kernels.triton")
    launch = importlib.import_module("stretto.kernels.triton.launch")
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for name, kernel in vars(module).items():
            if isinstance(kernel, launch.Kernel) and kernel.function.fn.__module__ == module.__name__:
                function = kernel.function
                monkeypatch.setattr(function, "run", recorder(seen, f"{info.name}.{name}", function))
    return seen


def recorder(seen: set[tuple], name: str, kernel):
    """Record the signature instead of running the kernel: nothing here looks at results."""
    free = set(kernel.kwargs.get("do_not_specialize") or ()) if hasattr(kernel, "kwargs") else set()

    def record(*args, grid=None, warmup=False, **kwargs):
        named = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
        seen.add((name, *(f"{k}:{signature(v, k in free, k.isupper())}" for k, v in sorted(named.items()))))

    return record


def signature(value, free: bool, constant: bool) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype},{value.data_ptr() % 16 == 0}"
    if value is None or constant or isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        kind = "i32" if -(2**31) <= value < 2**31 else "i64"
        return kind if free else f"{kind},{value % 16 == 0},{value == 1}"
    return type(value).__name__


def test_batch_sizes_do_not_reach_the_compiler(triton_kernels, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("tests/gpu counts real compilations")
    seen = launches(monkeypatch)

    def step(num_nodes: int, num_edges: int) -> None:
        row, col = torch.randint(0, num_nodes, (2, num_edges))
        rowptr, columns, ids = build.compress(row, col, num_nodes, torch.int32)
        csr = Csr(rowptr, columns, ids, num_nodes, num_nodes, num_edges)
        x = torch.randn(num_nodes, 32)
        triton_kernels.spmm(csr, x, torch.rand(num_edges), reduce="max", count_ties=True)
        triton_kernels.spmm(csr, x.view(num_nodes, 2, 16), torch.rand(num_edges, 2))
        triton_kernels.sddmm(csr, x.view(num_nodes, 2, 16), x.view(num_nodes, 2, 16))
        triton_kernels.edge_softmax(csr, torch.rand(num_edges, 2))
        triton_kernels.gather_rows(x, columns)
        a = Attention("gat", x.view(num_nodes, 2, 16), torch.rand(num_nodes, 2), torch.rand(num_nodes, 2))
        a.dropout, a.seed = 0.5, num_edges * 77_777_777_777
        triton_kernels.attention(csr, a, weights=True)

    for sizes in ((64, 3000), (50, 200), (3, 1)):  # with hubs, without, already in order
        step(*sizes)
    before = len(seen)
    assert before >= 10
    for k in range(500):  # a thousand sizes
        step(3 + 11 * k, 290 + 37 * k)
        step(3 + k, 1 + k)
    assert len(seen) == before, sorted(seen)[:5]
