"""Store: a graph and its features in a folder of raw arrays, memory-mapped, larger than RAM where need be.

    folder/meta.json       what there is: types, and name, file, dtype, shape and checksum of every array
    folder/*.bin           the arrays; edges in CSC order, so that e_id counts positions in the store

Homogeneous graphs have one node and one edge type, whose names are None; the arrays of others are called TYPE/NAME.

A store is written beside its final place and moved there when it is complete: a half-written one is never opened.
Features may be stored as fp32, fp16, bf16, or int8 with one scale per column, which batches bring back as fp32.
"""

import json
import mmap
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from stretto.errors import StrettoError, expect, fail
from stretto.kernels import build
from stretto.loader.arrays import EdgeArrays, GraphArrays, as_times
from stretto.loader.arrays import read as read_arrays
from stretto.loader.native_sampler import running_weights

FORMAT = 2
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


@dataclass(frozen=True)
class Attribute:
    """An attribute of a node type or an edge type; None is the only one."""

    type: Any
    name: str
    of_edges: bool


class Store:
    """A graph on disk, opened. `data` holds its arrays as memory-mapped tensors, `graph` its edges for the sampler."""

    def __init__(self, folder: str | Path, *, verify: bool | None = None) -> None:
        """verify: compare every checksum; None: while the store is no larger than CHECK_AT_MOST."""
        self.folder = Path(folder)
        meta = _read_meta(self.folder)
        self.arrays: dict[str, Tensor] = {}
        total = sum(entry["bytes"] for entry in meta["arrays"])
        for entry in meta["arrays"]:
            self.arrays[entry["name"]] = self._map(entry, total <= CHECK_AT_MOST if verify is None else verify)
        node_types = [(_type(entry["type"]), int(entry["num_nodes"])) for entry in meta["node_types"]]
        edge_types = [_type(entry) for entry in meta["edge_types"]]
        self.attributes = [Attribute(_type(a["type"]), a["name"], a["of_edges"]) for a in meta["attributes"]]
        edges = {t: EdgeArrays(self.arrays[_name(t, "colptr")], self.arrays[_name(t, "row")]) for t in edge_types}
        self.graph = GraphArrays([t for t, _ in node_types], edge_types, dict(node_types), edges)
        self.data: Any = HeteroData() if self.graph.is_hetero else Data()
        for t, count in node_types:
            self._part(t).num_nodes = count
        for a in self.attributes:
            self._part(a.type)[a.name] = self.arrays[_name(a.type, a.name)]

    @property
    def num_nodes(self) -> int:
        return sum(self.graph.num_nodes.values())

    @property
    def num_edges(self) -> int:
        return sum(edges.row.numel() for edges in self.graph.edges.values())

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.arrays.values())

    def _part(self, kind: Any) -> Any:
        return self.data if kind is None else self.data[kind]

    def scale(self, kind: Any, name: str) -> Tensor | None:
        """One factor per column where the attribute is stored as int8."""
        return self.arrays.get(_name(kind, name + ".scale"))

    def read(self, *, time_attr: str | None = None, weight_attr: str | None = None) -> GraphArrays:
        """The graph with an attribute of nodes or edges as times and one of edges as sampling weights.

        Edges that are not in the order of time within each target are sorted, in memory.
        """
        found = self.graph
        if weight_attr is not None:
            have = {a.name for a in self.attributes if a.of_edges}
            expect(weight_attr in have, f"Store: {weight_attr!r} is no edge attribute, wanted one of {sorted(have)}")
        times = {a.type: a.of_edges for a in self.attributes if a.name == time_attr}
        if time_attr is not None:
            expect(
                len(set(times.values())) == 1,
                f"Store: 'time_attr' is {time_attr!r}, which "
                + ("is both of nodes and of edges" if times else "is neither an attribute of nodes nor of edges"),
            )
        of_nodes = {t: as_times(self.arrays[_name(t, time_attr)], time_attr) for t, edge in times.items() if not edge}
        edges = {}
        for kind, plain in found.edges.items():
            e = plain
            source = None if kind is None else kind[0]
            if times.get(kind):
                e = _by_time(e, as_times(self.arrays[_name(kind, time_attr)], time_attr))
            elif source in of_nodes:
                e = _by_time(e, of_nodes[source][e.row.long()])
            weight = self.arrays.get(_name(kind, weight_attr)) if weight_attr is not None else None
            if weight is not None:
                weight = weight.view(-1) if e.edge_id is None else weight.view(-1)[e.edge_id.long()]
                e = replace(e, running=running_weights(e.colptr, weight))
            edges[kind] = e
        return replace(found, edges=edges, node_time=of_nodes, temporal=time_attr is not None)

    def load(self) -> Any:
        """Everything in memory, as a Data or HeteroData with its edge_index (in CSC order)."""
        out: Any = HeteroData() if self.graph.is_hetero else Data()
        for kind, count in self.graph.num_nodes.items():
            (out if kind is None else out[kind]).num_nodes = count
        for kind, e in self.graph.edges.items():
            target = torch.repeat_interleave(e.colptr.diff(), output_size=e.row.numel())
            (out if kind is None else out[kind]).edge_index = torch.stack([e.row.long(), target])
        for a in self.attributes:
            value, scale = self.arrays[_name(a.type, a.name)], self.scale(a.type, a.name)
            part = out if a.type is None else out[a.type]
            part[a.name] = value.clone() if scale is None else value.float() * scale
        return out

    def with_features(self, x: Tensor) -> "Store":
        """The same graph of one node type with other features, in memory or mapped; nothing is written."""
        expect(not self.graph.is_hetero, "Store: with_features is for graphs of one node type")
        other = object.__new__(Store)
        own = {name: self.arrays[name] for name in ("colptr", "row")}
        other.__dict__ = {
            **self.__dict__,
            "data": Data(x=x, num_nodes=self.num_nodes),
            "attributes": [Attribute(None, "x", False)],
            "arrays": {**own, "x": x},
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
        flat = mapped(path, dtype)
        if verify and _checksum(flat) != entry["checksum"]:
            fail(f"Store: {path} does not match its checksum: the file is damaged")
        return flat.view(shape)

    # ---- writing ----

    @staticmethod
    def create(
        folder: str | Path,
        data: Data | HeteroData,
        *,
        features: str = "as is",
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> "Store":
        """Write a Data or HeteroData to a folder and open it. features: how every `x` is stored, one of FEATURES."""
        expect(features in FEATURES, f"Store: 'features' is {features!r}, wanted one of {', '.join(FEATURES)}")
        wanted = isinstance(data, (Data, HeteroData))
        expect(wanted, f"Store: 'data' is {type(data).__name__}, wanted Data or HeteroData")
        folder = Path(folder)
        if folder.exists():
            expect(overwrite, f"Store: {folder} exists; pass overwrite=True to replace it")
        graph = read_arrays(data)
        arrays, attributes = _collect(data, graph, features)
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
            "node_types": [{"type": t, "num_nodes": graph.num_nodes[t]} for t in graph.node_types],
            "edge_types": graph.edge_types,
            "attributes": [{"type": a.type, "name": a.name, "of_edges": a.of_edges} for a in attributes],
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


def mapped(path: Path, dtype: torch.dtype) -> Tensor:
    """A file as a tensor, read page by page as it is asked for. What is written into it never reaches the file."""
    with path.open("rb") as file:
        if not hasattr(mmap, "MAP_PRIVATE"):
            return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=dtype)
        # Nothing is set aside for copies of pages: a system would refuse to for a file larger than its memory.
        no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000) if sys.platform == "linux" else 0
        memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE | no_reserve, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(memory, dtype=dtype)


def _collect(data: Any, graph: GraphArrays, features: str) -> tuple[dict[str, Tensor], list[Attribute]]:
    """Every array to be written, by name, and the attributes among them; those of edges in CSC order."""
    arrays: dict[str, Tensor] = {}
    for kind, e in graph.edges.items():
        arrays[_name(kind, "colptr")], arrays[_name(kind, "row")] = e.colptr, e.row
    found: list[Attribute] = []
    kinds = [None] if not graph.is_hetero else [*graph.node_types, *graph.edge_types]
    for kind in kinds:
        held = data._store if kind is None else data[kind]
        for name, value in held.items():
            if name in ("edge_index", "adj_t", "num_nodes") or not isinstance(value, Tensor):
                continue
            of_edges = isinstance(kind, tuple) or (kind is None and not data.is_node_attr(name))
            if of_edges and not (data.is_edge_attr(name) if kind is None else held.is_edge_attr(name)):
                continue
            if not of_edges and kind is not None and not held.is_node_attr(name):
                continue
            key = _name(kind, name)
            expect(key not in arrays, f"Store: attribute {name!r} has a name that the store needs itself")
            order = graph.edges[kind].edge_id if of_edges else None
            arrays[key] = value if order is None else value[order.long()]
            found.append(Attribute(kind, name, of_edges))
            if name == "x" and not of_edges:
                arrays.update({_name(kind, part): t for part, t in _stored(value, features).items()})
    return arrays, found


def _by_time(edges: EdgeArrays, time: Tensor) -> EdgeArrays:
    """The edges of each target in the order of time, which come with it."""
    count = edges.row.numel()
    rising = time[1:] >= time[:-1]
    starts = edges.colptr[1:-1]
    rising[(starts[(starts > 0) & (starts < count)] - 1)] = True  # another target begins
    if bool(rising.all()):
        return replace(edges, time=time.contiguous())
    target = torch.repeat_interleave(edges.colptr.diff(), output_size=count)
    order = time.argsort(stable=True)
    order = order[target[order].argsort(stable=True)]
    return replace(edges, row=edges.row[order].contiguous(), edge_id=order, time=time[order].contiguous())


def _name(kind: Any, name: str | None) -> str:
    """What an array is called in meta.json."""
    if kind is None:
        return str(name)
    return f"{kind if isinstance(kind, str) else '__'.join(kind)}/{name}"


def _type(value: Any) -> Any:
    """A node or edge type as PyG has it, from JSON."""
    return tuple(value) if isinstance(value, list) else value


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
        wanted = {"format", "node_types", "edge_types", "attributes", "arrays"}
        if meta.get("format") != FORMAT or not wanted <= meta.keys():
            fail(f"Store: {path} has format {meta.get('format')!r}, wanted {FORMAT}")
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
        raise StrettoError(f"Store: {path} cannot be read: {error}") from error
    return meta
