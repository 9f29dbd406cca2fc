"""Store: a graph and its features in a folder of raw arrays, memory-mapped, larger than RAM where need be.

    folder/meta.json       what there is: name, file, dtype, shape and checksum of every array
    folder/*.bin           the arrays; edges in CSC order, so that e_id counts positions in the store

A store is written beside its final place and moved there when it is complete: a half-written one is never opened.
Features may be stored as fp32, fp16, bf16, or int8 with one scale per column, which batches bring back as fp32.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from stretto.errors import StrettoError, expect, fail
from stretto.kernels import build
from stretto.loader.arrays import EdgeArrays, GraphArrays
from stretto.loader.arrays import read as read_arrays
from stretto.loader.native_sampler import running_weights

FORMAT = 1
DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
    )
}  # fmt: skip
FEATURES = ("fp32", "fp16", "bf16", "int8", "as is")
_FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CHECK_AT_MOST = 4 << 30  # bytes whose checksums are verified at every opening, unless told otherwise
CHUNK = 1 << 26  # bytes written at a time

Progress = Callable[[int, int], None]


class Store:
    """A graph on disk, opened. `data` holds its arrays as memory-mapped tensors, `graph` its edges for the sampler."""

    def __init__(self, folder: str | Path, *, verify: bool | None = None) -> None:
        """verify: compare every checksum; None: while the store is no larger than CHECK_AT_MOST."""
        self.folder = Path(folder)
        meta = _read_meta(self.folder)
        self.num_nodes = int(meta["num_nodes"])
        self.arrays: dict[str, Tensor] = {}
        total = sum(entry["bytes"] for entry in meta["arrays"])
        for entry in meta["arrays"]:
            self.arrays[entry["name"]] = self._map(entry, total <= CHECK_AT_MOST if verify is None else verify)
        self.scales = {name.removesuffix(".scale"): t for name, t in self.arrays.items() if name.endswith(".scale")}
        self.edge_attributes = tuple(meta["edge_attributes"])
        self.data = Data(num_nodes=self.num_nodes)
        for name in meta["attributes"]:
            self.data[name] = self.arrays[name]
        edges = EdgeArrays(self.arrays["colptr"], self.arrays["row"])
        self.graph = GraphArrays([None], [None], {None: self.num_nodes}, {None: edges})

    @property
    def num_edges(self) -> int:
        return self.arrays["row"].numel()

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.arrays.values())

    def weighted(self, name: str | None) -> GraphArrays:
        """The graph with the edge attribute `name` as sampling weights; as it is without one."""
        if name is None:
            return self.graph
        expect(
            name in self.edge_attributes, f"Store: {name!r} is no edge attribute, wanted one of {self.edge_attributes}"
        )
        edges = self.graph.edges[None]
        running = running_weights(edges.colptr, self.arrays[name])
        return replace(self.graph, edges={None: replace(edges, running=running)})

    def load(self) -> Data:
        """Everything in memory, as a Data with its edge_index (in CSC order)."""
        edges = self.graph.edges[None]
        target = torch.repeat_interleave(edges.colptr.diff(), output_size=self.num_edges)
        out = Data(edge_index=torch.stack([edges.row.long(), target]), num_nodes=self.num_nodes)
        for name, value in self.data._store.items():
            if name != "num_nodes":
                out[name] = value.float() * self.scales[name] if name in self.scales else value.clone()
        return out

    def with_features(self, x: Tensor) -> "Store":
        """The same graph with other features, in memory or mapped; nothing is written."""
        other = object.__new__(Store)
        other.__dict__ = {
            **self.__dict__,
            "data": Data(x=x, num_nodes=self.num_nodes),
            "scales": {},
            "edge_attributes": (),
        }
        return other

    def __repr__(self) -> str:
        return f"Store({str(self.folder)!r}, {self.num_nodes} nodes, {self.num_edges} edges, {self.nbytes} bytes)"

    def _map(self, entry: dict[str, Any], verify: bool) -> Tensor:
        path = self.folder / entry["file"]
        if not path.is_file():
            fail(f"Store: {path} is missing")
        size = path.stat().st_size
        if size != entry["bytes"]:
            fail(f"Store: {path} has {size} bytes, wanted {entry['bytes']}: the file is truncated or not of this store")
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        flat = torch.from_file(str(path), shared=False, size=size // dtype.itemsize, dtype=dtype)
        if verify and _checksum(flat) != entry["checksum"]:
            fail(f"Store: {path} does not match its checksum: the file is damaged")
        return flat.view(shape)

    # ---- writing ----

    @staticmethod
    def create(
        folder: str | Path,
        data: Data,
        *,
        features: str = "as is",
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> "Store":
        """Write a Data to a folder and open it. features: how `x` is stored, one of FEATURES."""
        expect(features in FEATURES, f"Store: 'features' is {features!r}, wanted one of {', '.join(FEATURES)}")
        expect(isinstance(data, Data), f"Store: 'data' is {type(data).__name__}, wanted Data")
        folder = Path(folder)
        if folder.exists():
            expect(overwrite, f"Store: {folder} exists; pass overwrite=True to replace it")
        graph = read_arrays(data)
        edges = graph.edges[None]
        arrays: dict[str, Tensor] = {"colptr": edges.colptr, "row": edges.row}
        names, of_edges = [], []
        for name, value in data._store.items():
            if name in ("edge_index", "adj_t", "num_nodes") or not isinstance(value, Tensor):
                continue
            expect(name not in arrays, f"Store: attribute {name!r} has a name that the store needs itself")
            if data.is_edge_attr(name) and not data.is_node_attr(name):
                of_edges.append(name)
                value = value if edges.edge_id is None else value[edges.edge_id.long()]
            elif not data.is_node_attr(name):
                continue
            names.append(name)
            arrays[name] = value
            if name == "x":
                arrays.update(_stored(value, features))
        partial = folder.with_name(folder.name + ".partial")
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        total = sum(t.numel() * t.element_size() for t in arrays.values())
        done = 0
        entries = []
        for name, tensor in arrays.items():
            entries.append(_write(partial, name, tensor, done, total, progress))
            done += entries[-1]["bytes"]
        meta = {
            "format": FORMAT,
            "num_nodes": graph.num_nodes[None],
            "attributes": names,
            "edge_attributes": of_edges,
            "arrays": entries,
        }
        with (partial / "meta.json").open("w") as file:
            json.dump(meta, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(partial, folder)
        return Store(folder)


def _stored(x: Tensor, features: str) -> dict[str, Tensor]:
    """x in the type it is stored in, with its scale where that is int8."""
    if features == "as is":
        return {"x": x}
    if features != "int8":
        return {"x": x.to(_FLOATS[features])}
    expect(x.dim() == 2, f"Store: features='int8' wants x of shape [nodes, columns], got {list(x.shape)}")
    scale = x.abs().amax(dim=0).float().clamp(min=torch.finfo(torch.float32).tiny) / 127
    return {"x": (x / scale).round().clamp(-127, 127).to(torch.int8), "x.scale": scale}


def _write(folder: Path, name: str, tensor: Tensor, done: int, total: int, progress: Progress | None) -> dict[str, Any]:
    """One array to its file, chunk by chunk, and its line of meta.json."""
    tensor = tensor.detach().cpu().contiguous()
    file = f"{name.replace('/', '_')}.bin"
    flat = tensor.view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    with (folder / file).open("wb") as out:
        for start in range(0, flat.numel(), CHUNK):
            piece = flat[start : start + CHUNK]
            out.write(piece.numpy().data)
            if progress is not None:
                progress(done + start + piece.numel(), total)
        out.flush()
        os.fsync(out.fileno())
    return {
        "name": name,
        "file": file,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "bytes": flat.numel(),
        "checksum": _checksum(tensor.view(-1)),
    }


def _checksum(flat: Tensor) -> str:
    if flat.numel() == 0:
        return ""
    digest = build.content_hash(flat.view(torch.uint8) if flat.dtype == torch.bool else flat)
    if digest is None:
        fail("Store: checksums need libstretto, which is not loaded")
    return "".join(f"{part & 0xFFFFFFFFFFFFFFFF:016x}" for part in digest)


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / "meta.json"
    if not path.is_file():
        fail(f"Store: {folder} is no store: it has no meta.json")
    try:
        meta = json.loads(path.read_text())
        wanted = {"format", "num_nodes", "attributes", "edge_attributes", "arrays"}
        if meta.get("format") != FORMAT or not wanted <= meta.keys():
            fail(f"Store: {path} has format {meta.get('format')!r}, wanted {FORMAT}")
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
        raise StrettoError(f"Store: {path} cannot be read: {error}") from error
    return meta
