"""stretto: graph neural networks written in PyTorch Geometric, several times faster, with two lines added."""

from stretto import ops
from stretto.errors import StrettoError
from stretto.graph import Graph
from stretto.inference import inference
from stretto.loader import LinkNeighborLoader, NeighborLoader, NeighborSampler, Store
from stretto.plugin import accelerate, accelerated, is_patched, patch, restore, unpatch
from stretto.report import explain, report

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
    "explain",
    "inference",
    "is_patched",
    "ops",
    "patch",
    "report",
    "restore",
    "unpatch",
]
