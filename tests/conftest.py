"""What every test shares: a cache folder of its own, fixed seeds, the process left as it was found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stretto import Graph
from stretto.kernels import native
from stretto.ops.pick import picker

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True, scope="session")
def fused_first():
    """PyG writes propagate() once a class, as its first instance needs it: one that cannot fuse (an aggregation of its
    own, such as a median) would break sparse matrices in those that can, in every test after it."""
    from torch_geometric import nn  # not at import: a process of interpreter tests has its own order

    nn.GCNConv(1, 1), nn.SAGEConv(1, 1), nn.GraphConv(1, 1), nn.GINConv(torch.nn.Linear(1, 1)), nn.GCN2Conv(1, 0.1)
    nn.SGConv(1, 1), nn.SSGConv(1, 1, 0.1), nn.TAGConv(1, 1), nn.LGConv(), nn.APPNP(1, 0.1), nn.MFConv(1, 1)
    nn.ARMAConv(1, 1), nn.ClusterGCNConv(1, 1), nn.RGCNConv(1, 1, 1)


@pytest.fixture(autouse=True)
def own_world(tmp_path, monkeypatch):
    """The user's tuning cache is never touched; seeds, threads and instruction set are the same for every test."""
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    picker.forget()
    torch.manual_seed(0)
    threads, isa = torch.get_num_threads(), native.isa()
    yield
    torch.set_num_threads(threads)
    if native.library() is not None:
        native.set_isa(isa)


@pytest.fixture
def fresh_memo():
    """No graph remembered, before and after."""
    Graph.cache_clear()
    yield
    Graph.cache_clear()


@pytest.fixture
def run_python(tmp_path):
    """run_python(code, **environment) -> finished process: the code in a new interpreter, from the checkout."""

    def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, "STRETTO_CACHE": str(tmp_path / "cache"), **environment}
        return subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=240
        )

    return run


@pytest.fixture
def needs_native():
    """Skip where libstretto is not loaded."""
    if native.library() is None:
        pytest.skip(f"libstretto is not loaded: {native.why_not()}")
