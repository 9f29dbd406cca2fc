"""Triton's kernels on whatever is here: a GPU, or CPU tensors under the interpreter."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from stretto import kernels
from stretto.kernels import build
from stretto.kernels.csr import Csr

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def device() -> str:
    """Where the kernels run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def triton_kernels(device: str) -> kernels.Backend:
    """The kernels under test, made for the interpreter where there is no GPU."""
    if device == "cuda":
        return importlib.import_module("stretto.kernels.triton").BACKEND
    # Triton looks at the variable when a function is decorated: its own library's, unless another test has imported it
    # already, and ours.
    assert "stretto.kernels.triton" not in sys.modules, "imported before the interpreter was asked for"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        interpret(importlib.import_module("triton.language"))
        return importlib.import_module("stretto.kernels.triton").BACKEND


@pytest.fixture(autouse=True)
def _interpreted(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is on for the tests of this folder, and for no others of this process."""
    if device == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def interpret(language: ModuleType) -> None:
    """Decorate anew what Triton's library was imported with before the interpreter was asked for."""
    jit = importlib.import_module("triton").jit
    for name, function in list(vars(language).items()):
        if isinstance(function, importlib.import_module("triton.runtime.jit").JITFunction):
            setattr(language, name, jit(function.fn))


@pytest.fixture
def short_pieces(triton_kernels: kernels.Backend, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Rows of more than 8 edges are hubs, so that small graphs have some."""
    pieces = importlib.import_module("stretto.kernels.triton.pieces")
    monkeypatch.setattr(pieces, "LEAST_CHUNK", 8)
    return pieces


@pytest.fixture
def forced(triton_kernels: kernels.Backend) -> Iterator[None]:
    """Every op of stretto runs on these kernels."""
    with kernels.forced(triton_kernels):
        yield


def matrix(row: list[int], col: list[int], n: int, m: int, device: str, dtype: torch.dtype = torch.int32) -> Csr:
    """A matrix from pairs, in the user's order."""
    rows, cols = (torch.tensor(v, dtype=torch.int64) for v in (row, col))
    rowptr, columns, ids = build.compress(rows, cols, n, dtype)
    assert columns is not None
    return Csr(rowptr.to(device), columns.to(device), None if ids is None else ids.to(device), n, m, len(row))


def pairs(name: str) -> tuple[list[int], list[int], int, int]:
    """Rows, columns and sizes of a small adversarial graph."""
    generator = torch.Generator().manual_seed(7)

    def draw(n: int, most: int) -> list[int]:
        return torch.randint(0, most, (n,), generator=generator).tolist()

    graphs = {
        "empty": ([], [], 5, 4),
        "one node": ([0], [0], 1, 1),
        "isolated": ([6, 1, 1, 6, 6], [0, 6, 6, 2, 6], 8, 8),  # duplicates and self-loops too
        "hub": ([3] * 19 + draw(6, 5), draw(25, 6), 5, 6),  # three pieces of 8 edges
        "bipartite": (draw(25, 3), draw(25, 11), 3, 11),
        "sorted": (sorted(draw(20, 7)), draw(20, 7), 7, 7),
    }
    return graphs[name]


GRAPHS = ("empty", "one node", "isolated", "hub", "bipartite", "sorted")


@pytest.fixture(params=GRAPHS)
def csr(request: pytest.FixtureRequest, device: str, short_pieces: ModuleType) -> Csr:
    """One matrix after the other."""
    return matrix(*pairs(request.param), device=device)


@pytest.fixture
def make(device: str, short_pieces: ModuleType):
    """make(name, dtype): one matrix by name, with columns of a type."""
    return lambda name, dtype=torch.int32: matrix(*pairs(name), device=device, dtype=dtype)


@pytest.fixture
def transposed():
    """transposed(csr): the transpose, with the positions of its entries in the user's order."""

    def transpose(csr: Csr) -> Csr:
        rowptr, col, edge_id = (None if t is None else t.cpu() for t in (csr.rowptr, csr.col, csr.edge_id))
        assert rowptr is not None
        host = Csr(rowptr, col, edge_id, csr.num_rows, csr.num_cols, csr.num_edges)
        host.tasks, host.hubs, host.num_slots = build.schedule(rowptr, csr.num_rows, csr.num_edges)
        arrays = (t.to(csr.device) for t in build.transpose(host))
        return Csr(*arrays, csr.num_cols, csr.num_rows, csr.num_edges)

    return transpose
