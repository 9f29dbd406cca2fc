"""stretto: graph neural networks written in PyTorch Geometric, several times faster, with two lines added."""

import importlib as _importlib
import warnings as _warnings

with _warnings.catch_warnings():  # PyG scripts two classes as it is loaded: nothing that a user of ours can do about
    _warnings.filterwarnings("ignore", r"`torch\.jit\.script` is deprecated", DeprecationWarning)
    import torch_geometric as _torch_geometric  # noqa: F401

from stretto import ops
from stretto.errors import StrettoError
from stretto.graph import Graph
from stretto.loader import LinkNeighborLoader, NeighborLoader, NeighborSampler, Store
from stretto.plug.accelerate import accelerate, accelerated, forget, is_patched, patch, restore, unpatch
from stretto.plug.explain import explain
from stretto.plug.inference import inference
from stretto.plug.report import report

__version__ = "0.1.0"

__all__ = [
    "Graph",
    "LinkNeighborLoader",
    "NeighborLoader",
    "NeighborSampler",
    "Store",
    "StrettoError",
    "accelerate",
    "accelerated",
    "analyze",
    "dist",
    "explain",
    "forget",
    "inference",
    "is_patched",
    "ops",
    "patch",
    "profile",
    "report",
    "restore",
    "unpatch",
]


def __getattr__(name: str) -> object:
    """stretto.analyze, dist and profile, loaded when first asked for: few programs need them."""
    if name in ("analyze", "dist", "profile"):
        return _importlib.import_module(f"stretto.{name}")
    raise AttributeError(f"module 'stretto' has no attribute {name!r}")
