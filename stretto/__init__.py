"""stretto: graph neural networks written in PyTorch Geometric, several times faster, with two lines added."""

from stretto import ops
from stretto.errors import StrettoError
from stretto.graph import Graph

__version__ = "0.1.0"

__all__ = [
    "Graph",
    "StrettoError",
    "ops",
]
