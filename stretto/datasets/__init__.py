"""Graphs to run on: the embedded Cora, `.npz` files, random families; all found by name."""

from stretto.datasets.families import er, grid, hub, rmat, star
from stretto.datasets.named import data_folder, grammar, load, load_graph, names
from stretto.datasets.npz import Dataset, HeteroDataset, read_npz

__all__ = [
    "Dataset",
    "HeteroDataset",
    "data_folder",
    "er",
    "grammar",
    "grid",
    "hub",
    "load",
    "load_graph",
    "names",
    "read_npz",
    "rmat",
    "star",
]
