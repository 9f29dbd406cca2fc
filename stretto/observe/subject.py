"""What a command line names: a built-in model on a graph, or FILE.py:FUNCTION that makes a model and its data."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from stretto import datasets
from stretto.errors import expect, fail
from stretto.observe.models import MODELS, as_data, make

WIDTH = 64  # features of graphs that have none


def subject(target: str, graph: str, hidden: int, layers: int, device: str = "cpu") -> tuple[nn.Module, Any]:
    """(model, data) for a target; a function of a file puts them where it likes."""
    expect(hidden >= 1, f"'--hidden' is {hidden}, wanted 1 or more")
    expect(layers >= 1, f"'--layers' is {layers}, wanted 1 or more")
    if target in MODELS:
        data = as_data(datasets.load_graph(graph), width=WIDTH)
        model = make(target, data.x.size(1), hidden, int(data.y.max()) + 1, layers)
        return model.to(usable(device)), data.to(device)
    path, _, function = target.rpartition(":")
    if not path.endswith(".py"):
        fail(f"no model {target!r}, wanted FILE.py:FUNCTION or one of {', '.join(MODELS)}")
    expect(Path(path).is_file(), f"no file {path!r}")
    make_both = getattr(_loaded(path), function, None)
    expect(callable(make_both), f"{path} has no function {function!r} that returns a model and its data")
    result = make_both()  # type: ignore[misc]
    fine = isinstance(result, (tuple, list)) and len(result) == 2 and isinstance(result[0], nn.Module)
    expect(fine, f"{target} returned {_said(result)}, wanted a model and its data: return model, data")
    return result[0], result[1]


def _loaded(path: str) -> ModuleType:
    """The file as a module of its own name, which its classes are found by, in other processes too; what lies beside it
    can be imported."""
    file = Path(path).resolve()
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    known = getattr(sys.modules.get(file.stem), "__file__", str(file))
    name = file.stem if known == str(file) else f"{file.stem} of {file.parent}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _said(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(type(v).__name__ for v in value)})"
    return f"a {type(value).__name__}"


def usable(device: str) -> str:
    """The device, if this machine has it."""
    expect(device in ("cpu", "cuda"), f"'device' is {device!r}, wanted cpu or cuda")
    expect(device == "cpu" or torch.cuda.is_available(), "'device' is 'cuda', but torch finds no card here")
    return device


def writable(path: Path | None, what: str) -> None:
    """Raise, before any work is done, if a file cannot be written there. None: nothing is to be written."""
    if path is not None:
        expect(path.parent.is_dir(), f"{what} is {str(path)!r}, but there is no folder {str(path.parent)!r}")
        expect(not path.is_dir(), f"{what} is {str(path)!r}, which is a folder")
        place = path if path.exists() else path.parent
        expect(os.access(place, os.W_OK), f"{what} is {str(path)!r}, but {str(place)!r} cannot be written to")
