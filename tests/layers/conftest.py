"""What tests of layers share."""

import importlib

import pytest


@pytest.fixture
def sums(monkeypatch):
    """Widths of all sums over neighbours since it was cleared."""
    module, found = importlib.import_module("stretto.ops.spmm"), []
    plain = module.run

    def run(graph, x, *args):
        found.append(x.size(1))
        return plain(graph, x, *args)

    monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr("stretto.compile.execute.run_spmm", run)
    return found
