"""What tests of layers share."""

import importlib

import pytest


@pytest.fixture
def sums(monkeypatch):
    """Widths of all sums over neighbours since it was cleared."""
    module, found = importlib.import_module("stretto.ops.spmm"), []

    def noted(function):
        def run(graph, x, *args):
            found.append(x.size(1))
            return function(graph, x, *args)

        return run

    for name in ("step", "plainly"):
        monkeypatch.setattr(module.KERNEL, name, noted(getattr(module.KERNEL, name)))
    monkeypatch.setattr("stretto.compile.adjacency.run_spmm", noted(module.run))
    return found
