"""Environment variables: read on one page, checked, and each does what the page says."""

import logging
import re
from pathlib import Path

import pytest
import torch

from stretto import StrettoError, settings
from stretto.kernels import native
from stretto.ops import OPS
from tests.compare import evaluate
from tests.graphs import ZOO, graph_of

ISAS = native.isas()
# Every op on part of the zoo, with gradients: what the fallback must reproduce.
NAMES = ("empty", "isolated", "duplicates", "wide", "tall", "no_nodes")


def everything() -> list[torch.Tensor]:
    """Results and gradients of every op and option in fp64, always from the same numbers."""
    torch.manual_seed(3)
    found = []
    for name in NAMES:
        assert name in ZOO
        for op in OPS.values():
            for sample in op.samples(graph_of(name), torch.float64):
                out = op.function(*sample.args, **sample.kwargs)
                found += evaluate(op.function, sample, torch.ones(out.shape, dtype=torch.float64))
    return found


COMPUTE = """
import logging, sys, torch
import stretto
from stretto import Graph, ops
from stretto.kernels import native
from tests.test_settings import everything
torch.save(everything(), sys.argv[1] if len(sys.argv) > 1 else PATH)
edge_index = torch.tensor([[0, 1, 2], [1, 2, 2]])
graph = Graph.of(edge_index, 3)
assert Graph.of(edge_index.clone(), 3) is graph
layer = torch.compile(lambda i, x: ops.spmm(Graph.of(i, 3), x, reduce="mean"), fullgraph=True, backend="aot_eager")
x = torch.randn(3, 2, requires_grad=True)
layer(edge_index.clone(), x).sum().backward()
print(native.isa(), "|", native.why_not(), "|", native.threads_runtime())
"""


def warnings_of(finished) -> list[str]:
    return [line for line in finished.stderr.splitlines() if "stretto" in line.lower() and "File " not in line]


def compute(run_python, path: Path, **environment: str):
    finished = run_python(COMPUTE.replace("PATH", repr(str(path))), **environment)
    assert finished.returncode == 0, finished.stderr
    return finished


@pytest.mark.usefixtures("needs_native")
def test_without_the_library_everything_is_the_same(run_python, tmp_path):
    """STRETTO_NATIVE=0 stands for a machine without a compiler: one line says so, results are equal."""
    finished = compute(run_python, tmp_path / "results.pt", STRETTO_NATIVE="0")
    assert len(warnings_of(finished)) == 1, finished.stderr
    assert "native kernels are off, plain PyTorch runs instead: STRETTO_NATIVE=0" in finished.stderr
    assert finished.stdout.startswith("none | STRETTO_NATIVE=0 | torch")
    theirs = torch.load(tmp_path / "results.pt")
    for mine, their in zip(everything(), theirs, strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("needs_native")
def test_the_instruction_set_can_be_chosen(run_python):
    finished = run_python("from stretto.kernels import native; print(native.isa())", STRETTO_CPU="baseline")
    assert finished.stdout.split() == ["baseline"], finished.stderr


@pytest.fixture
def not_loaded(monkeypatch, caplog):
    """As at the start of a process, before the library has been looked for; returns what is said since."""
    for name, value in (("_library", None), ("_why_not", ""), ("_tried", False)):
        monkeypatch.setattr(native, name, value)
    caplog.set_level(logging.WARNING, logger="stretto")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "stretto"]


@pytest.mark.usefixtures("needs_native")
def test_an_instruction_set_that_is_not_there_is_told_once(monkeypatch, not_loaded):
    monkeypatch.setenv("STRETTO_CPU", "mmx")
    assert native.isa() == native.isa() == "none"
    assert len(not_loaded()) == 1
    assert f"instruction set 'mmx' is not available, wanted one of: {' '.join(ISAS)}" in not_loaded()[0]


def test_a_library_that_is_not_there_is_told_once(monkeypatch, not_loaded):
    monkeypatch.setenv("STRETTO_LIBRARY", "nowhere.so")
    assert native.library() is None
    assert native.library() is None
    assert "nowhere.so" in native.why_not()
    assert len(not_loaded()) == 1
    assert native.location() == ""
    with pytest.raises(StrettoError, match=r"stretto_isa: libstretto is not loaded: .*nowhere\.so"):
        native.call("stretto_isa")


@pytest.mark.usefixtures("needs_native")
def test_a_library_of_another_version_or_of_other_sources_is_refused(monkeypatch, not_loaded):
    monkeypatch.setattr(native, "_VERSION", "9.9.9")
    assert native.library() is None
    assert re.search(r"has version [\d.]+, wanted 9\.9\.9", not_loaded()[0])
    monkeypatch.setattr(native, "_tried", False)
    monkeypatch.setitem(native.SIGNATURES, "stretto_fly", "p")
    assert native.library() is None
    assert "lacks stretto_fly: built from other sources, rebuild it" in not_loaded()[1]


def test_values_are_read_when_asked_for(monkeypatch):
    monkeypatch.setenv("STRETTO_GRAPH_CACHE", "7")
    assert settings.integer("STRETTO_GRAPH_CACHE") == 7
    monkeypatch.delenv("STRETTO_GRAPH_CACHE")
    assert settings.integer("STRETTO_GRAPH_CACHE") == int(settings.VARIABLES["STRETTO_GRAPH_CACHE"].default)
    monkeypatch.setenv("STRETTO_DISABLE", "1")
    assert settings.flag("STRETTO_DISABLE")
    for off in ("0", ""):
        monkeypatch.setenv("STRETTO_DISABLE", off)
        assert not settings.flag("STRETTO_DISABLE")


def test_bad_values_are_told(monkeypatch):
    for value in ("many", "-3", "1.5", ""):
        monkeypatch.setenv("STRETTO_GRAPH_CACHE", value)
        with pytest.raises(StrettoError, match=r"STRETTO_GRAPH_CACHE='.*': wanted an integer >= 0"):
            settings.integer("STRETTO_GRAPH_CACHE")
    monkeypatch.setenv("STRETTO_INDEX", "int16")
    with pytest.raises(StrettoError, match="STRETTO_INDEX='int16': wanted one of 'auto', 'int32', 'int64'"):
        graph_of("directed").with_self_loops  # noqa: B018
    with pytest.raises(StrettoError, match="unknown variable 'STRETTO_SPEED'"):
        settings.get("STRETTO_SPEED")


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "own"))
    assert settings.cache_folder() == tmp_path / "own"
    monkeypatch.delenv("STRETTO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert settings.cache_folder() == tmp_path / "xdg" / "stretto"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings.cache_folder() == tmp_path / ".cache" / "stretto"


def test_every_variable_says_what_it_is_for():
    for name, variable in settings.VARIABLES.items():
        assert name.startswith("STRETTO_")
        assert isinstance(variable.default, str)
        assert len(variable.meaning) > 10


# What each of them does not take; the others take any text, and whoever uses it tells what is wrong with it.
GARBAGE = {
    **{
        name: ("yes", " ", "STOCK", "0 ")
        for name, variable in settings.VARIABLES.items()
        if type(variable.takes) is tuple
    },
    "STRETTO_DATA": ("nowhere", "README.md"),
    **{
        f"STRETTO_{name}": ("many", "-1", "1.5", "--5", "\u00b2", "9" * 40)
        for name in ("GRAPH_CACHE", "GRAPH_CACHE_MB", "SHADOW", "HOIST_MB", "POOL_MB")
    },
}
ANY_TEXT = {"STRETTO_CPU", "STRETTO_LIBRARY", "STRETTO_CACHE", "STRETTO_SCRIPT", "STRETTO_COMMIT"}


def test_every_variable_is_checked_where_it_is_read(monkeypatch):
    assert set(GARBAGE) | ANY_TEXT == set(settings.VARIABLES)
    for name, values in GARBAGE.items():
        variable = settings.VARIABLES[name]
        assert settings.get(name) == variable.default
        for value in values:
            monkeypatch.setenv(name, value)
            for _ in range(2):  # and not only the first time
                with pytest.raises(StrettoError, match=re.escape(f"{name}={value!r}: wanted ")) as told:
                    settings.get(name)
            if isinstance(variable.takes, tuple):
                assert all(repr(word) in str(told.value) for word in variable.takes)
        for word in (*variable.takes, "") if isinstance(variable.takes, tuple) else ():
            monkeypatch.setenv(name, word)
            assert settings.get(name) == (word or variable.default)
        monkeypatch.delenv(name)


TRAIN_A_STEP = """
import sys, torch, stretto
from stretto.datasets import load_graph
from torch_geometric.nn import GCN
from torch_geometric.loader import NeighborLoader
try:
    model = stretto.accelerate(GCN(4, 8, 2, 3))
    x, edge_index = torch.randn(50, 4), torch.randint(50, (2, 200))
    model(x, edge_index).sum().backward()
    load_graph("elsewhere")
except stretto.StrettoError as error:
    print(error)
"""


@pytest.mark.parametrize("name", ["BACKEND", "PLAN", "NATIVE", "DATA"])
def test_garbage_reaches_the_user_as_an_error_of_two_lines(run_python, name):
    finished = run_python(TRAIN_A_STEP, **{f"STRETTO_{name}": "grbg"})
    assert finished.returncode == 0, finished.stderr
    assert f"STRETTO_{name}='grbg': wanted " in finished.stdout


def test_the_backend_is_looked_at_as_cheaply_as_it_is_checked(monkeypatch):
    assert not settings.torch_kernels()
    for value, expected in (("torch", True), ("stretto", False)):
        monkeypatch.setenv("STRETTO_BACKEND", value)
        assert settings.torch_kernels() is expected
    monkeypatch.setenv("STRETTO_BACKEND", "Torch")
    with pytest.raises(StrettoError, match="STRETTO_BACKEND='Torch': wanted one of 'stretto', 'torch'"):
        settings.torch_kernels()
