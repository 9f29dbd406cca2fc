"""Reads a graph from one `.npz` file: homogeneous, heterogeneous, or a collection of many small graphs.

Schema: `edge_index` [2, E] (row 0 source, row 1 destination) and `num_nodes`; features `x` [N, F], or CSR as `x_data`,
`x_indices`, `x_indptr`, `x_shape`; labels `y`; `train_mask`, `val_mask`, `test_mask`. Heterogeneous files append
`__TYPE` or `__SRC__REL__DST` to these names and say in `target` which type the labels belong to. Collections are one
disjoint union with `node_ptr` and `edge_ptr`; there labels and masks are per graph.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stretto.errors import expect, fail

MASKS = ("train_mask", "val_mask", "test_mask")
EdgeType = tuple[str, str, str]


@dataclass
class Dataset:
    """One graph, or many as a disjoint union."""

    name: str
    edge_index: Tensor  # int64 [2, E]
    num_nodes: int
    features: Tensor | None = None  # [N, F] as stored: dense, or sparse CSR
    y: Tensor | None = None  # int64 [N] with -1 for no label; per graph (int64 or float32) in a collection
    masks: dict[str, Tensor] = field(default_factory=dict)  # "train", "val", "test" -> bool
    extras: dict[str, Tensor] = field(default_factory=dict)  # edge_type, pos, node_ptr, test_edge_index, ...

    @cached_property
    def x(self) -> Tensor | None:
        """Dense features [N, F]. Sparse ones are filled in on first use; `features` has them as stored."""
        return None if self.features is None else dense(self.features)

    @property
    def num_edges(self) -> int:
        """Entries of edge_index."""
        return self.edge_index.shape[1]

    @property
    def num_graphs(self) -> int:
        """1, or the number of graphs in a collection."""
        return self.extras["node_ptr"].numel() - 1 if "node_ptr" in self.extras else 1

    @property
    def num_classes(self) -> int:
        """One more than the largest label; 0 without integer labels."""
        if self.y is None or self.y.is_floating_point() or not self.y.numel():
            return 0
        return int(self.y.max()) + 1


@dataclass
class HeteroDataset:
    """One graph with several types of nodes and edges. Ids are local to each node type."""

    name: str
    num_nodes: dict[str, int]
    edge_index: dict[EdgeType, Tensor]  # int64 [2, E]
    features: dict[str, Tensor]  # as stored: dense, or sparse CSR
    target: str  # the node type that y and the masks belong to
    y: Tensor
    masks: dict[str, Tensor]

    @cached_property
    def x(self) -> dict[str, Tensor]:
        """Dense features of each type that has some."""
        return {kind: dense(features) for kind, features in self.features.items()}

    @property
    def num_classes(self) -> int:
        """One more than the largest label."""
        return int(self.y.max()) + 1


def dense(features: Tensor) -> Tensor:
    """Features as a strided tensor."""
    return features if features.layout == torch.strided else features.to_dense()


def read_npz(path: str | Path) -> Dataset | HeteroDataset:
    """The graph stored at `path`."""
    path = Path(path)
    expect(path.is_file(), f"read_npz: no file {str(path)!r}")
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    if "target" in arrays:
        return _read_hetero(path.stem, arrays)
    for name in ("edge_index", "num_nodes"):
        expect(name in arrays, f"read_npz: {str(path)!r} has no {name!r}, only {', '.join(sorted(arrays))}")
    num_nodes = int(arrays["num_nodes"])
    known = {"edge_index", "num_nodes", "x", "x_data", "x_indices", "x_indptr", "x_shape", "y", *MASKS}
    return Dataset(
        name=path.stem,
        edge_index=_edges(arrays["edge_index"], num_nodes, num_nodes, str(path)),
        num_nodes=num_nodes,
        features=_features(arrays, ""),
        y=_tensor(arrays["y"]) if "y" in arrays else None,
        masks=_masks(arrays),
        extras={name: _tensor(array) for name, array in arrays.items() if name not in known},
    )


def _read_hetero(name: str, arrays: Mapping[str, np.ndarray]) -> HeteroDataset:
    num_nodes = {k.split("__")[1]: int(v) for k, v in arrays.items() if k.startswith("num_nodes__")}
    features = {kind: _features(arrays, f"__{kind}") for kind in num_nodes}
    edges: dict[EdgeType, Tensor] = {}
    for key, array in arrays.items():
        if key.startswith("edge_index__"):
            source, relation, destination = key.split("__")[1:]
            edges[source, relation, destination] = _edges(
                array, num_nodes[source], num_nodes[destination], f"{name}: {key}"
            )
    return HeteroDataset(
        name=name,
        num_nodes=num_nodes,
        edge_index=edges,
        features={kind: x for kind, x in features.items() if x is not None},
        target=str(arrays["target"]),
        y=_tensor(arrays["y"]),
        masks=_masks(arrays),
    )


def _edges(array: np.ndarray, num_sources: int, num_destinations: int, what: str) -> Tensor:
    """edge_index as int64, checked."""
    if array.ndim != 2 or array.shape[0] != 2:
        fail(f"read_npz: edge_index of {what} has shape {list(array.shape)}, wanted [2, E]")
    edges = torch.from_numpy(array.astype(np.int64))
    for end, row, size in (("source", edges[0], num_sources), ("destination", edges[1], num_destinations)):
        if row.numel() and not (int(row.min()) >= 0 and int(row.max()) < size):
            fail(f"read_npz: {end}s of {what} span {int(row.min())}..{int(row.max())}, but there are {size} such nodes")
    return edges


def _features(arrays: Mapping[str, np.ndarray], suffix: str) -> Tensor | None:
    """x, dense or CSR as stored, in fp32."""
    if f"x{suffix}" in arrays:
        return torch.from_numpy(arrays[f"x{suffix}"].astype(np.float32))
    if f"x_data{suffix}" not in arrays:
        return None
    data, indices, indptr, shape = (arrays[f"x_{part}{suffix}"] for part in ("data", "indices", "indptr", "shape"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(
            torch.from_numpy(indptr.astype(np.int64)),
            torch.from_numpy(indices.astype(np.int64)),
            torch.from_numpy(data.astype(np.float32)),
            size=tuple(int(n) for n in shape),
            check_invariants=True,
        )


def _masks(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {name.removesuffix("_mask"): torch.from_numpy(arrays[name]) for name in MASKS if name in arrays}


def _tensor(array: np.ndarray) -> Tensor:
    """Integers as int64, real numbers as fp32, truth values as they are."""
    if array.dtype.kind in "iu":
        return torch.from_numpy(array.astype(np.int64))
    return torch.from_numpy(array.astype(np.float32) if array.dtype.kind == "f" else array)
