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
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from stretto.errors import expect, fail
from stretto.kernels import build
from stretto.loader import checks, store_meta
from stretto.loader.arrays import EdgeArrays, GraphArrays, as_times
from stretto.loader.arrays import read as read_arrays
from stretto.loader.native_sampler import running_weights
from stretto.loader.store_meta import DTYPES, FORMAT, Attribute, Entry

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
        meta = store_meta.read(self.folder)
        verify = sum(entry.nbytes for entry in meta.entries) <= CHECK_AT_MOST if verify is None else verify
        self.arrays: dict[str, Tensor] = {entry.name: self._map(entry, verify) for entry in meta.entries}
        self.attributes = meta.attributes
        edges = {}
        for t in meta.edge_types:
            num_sources, num_targets = (meta.num_nodes[end] for end in ((None, None) if t is None else (t[0], t[2])))
            edges[t] = self._edges(t, num_sources, num_targets)
        self.graph = GraphArrays(list(meta.num_nodes), meta.edge_types, meta.num_nodes, edges)
        self.data: Any = HeteroData() if self.graph.hetero else Data()
        for t, count in meta.num_nodes.items():
            self._part(t).num_nodes = count
        for a in self.attributes:
            self._part(a.type)[a.name] = self._attribute(a)

    def _array(self, kind: Any, name: str) -> Tensor:
        """An array that meta.json must have."""
        if _name(kind, name) not in self.arrays:
            fail(f"Store: {self.folder / 'meta.json'}: there is no array {_name(kind, name)!r}")
        return self.arrays[_name(kind, name)]

    def _edges(self, kind: Any, num_sources: int, num_targets: int) -> EdgeArrays:
        """The edges of one type. That colptr rises and row lies in range is seen when they are read: both are long."""
        who = f"Store {self.folder}"
        row = checks.vector(who, _name(kind, "row"), self._array(kind, "row"), checks.INDEX)
        colptr = checks.vector(who, _name(kind, "colptr"), self._array(kind, "colptr"), (torch.int64,))
        checks.pointers(who, _name(kind, "colptr"), colptr, num_targets, row.numel(), rising=False)
        return EdgeArrays(colptr, row)

    def _attribute(self, a: Attribute) -> Tensor:
        """An attribute: one row for each node or edge, one factor of its scale for each column."""
        value, scale = self._array(a.type, a.name), self.scale(a.type, a.name)
        part = self._part(a.type)
        dim = part._parent().__cat_dim__(a.name, value, part)
        wanted = self.graph.edges[a.type].row.numel() if a.of_edges else self.graph.num_nodes[a.type]
        who, name = f"Store {self.folder}", _name(a.type, a.name)
        if value.size(dim) != wanted:
            what = "edge" if a.of_edges else "node"
            fail(f"{who}: {name!r} has {value.size(dim)} rows, wanted {wanted}, one for each {what}")
        if scale is not None:
            fits = value.dtype == torch.int8 and value.dim() == 2
            expect(fits, f"{who}: {name!r} is {checks.shape_of(value)}, wanted int8 of two dimensions: it has a scale")
            checks.vector(who, name + ".scale", scale, (torch.float32,), value.size(1))
        return value

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
        if times or weight_attr is not None:
            self._check_edges()
        of_nodes = {
            t: as_times(self.arrays[_name(t, time_attr)], time_attr, found.num_nodes[t])
            for t, edge in times.items()
            if not edge
        }
        edges = {}
        for kind, plain in found.edges.items():
            e = plain
            source = None if kind is None else kind[0]
            if times.get(kind):
                e = _by_time(e, _one_each(as_times(self.arrays[_name(kind, time_attr)], time_attr), e, time_attr))
            elif source in of_nodes:
                e = _by_time(e, of_nodes[source][e.row.long()])
            weight = self.arrays.get(_name(kind, weight_attr)) if weight_attr is not None else None
            if weight is not None:
                weight = _one_each(weight.reshape(-1), e, weight_attr)
                weight = weight if e.edge_id is None else weight[e.edge_id.long()]
                e = replace(e, running=running_weights(e.colptr, weight))
            edges[kind] = e
        return replace(found, edges=edges, node_time=of_nodes, temporal=time_attr is not None)

    def load(self) -> Any:
        """Everything in memory, as a Data or HeteroData with its edge_index (in CSC order)."""
        self._check_edges()
        out: Any = HeteroData() if self.graph.hetero else Data()
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
        """The same graph of one node type with other features, in memory or mapped; nothing is written or copied.

        x may be a view: rows that are contiguous are read where they lie, any others picked by torch for each batch.
        """
        expect(not self.graph.hetero, "Store: with_features is for graphs of one node type")
        if not checks.readable(x) or x.dim() == 0 or x.size(0) != self.num_nodes:
            fail(f"Store: 'x' is {checks.shape_of(x)}, wanted a dense tensor in memory with {self.num_nodes} rows")
        other = object.__new__(Store)
        own = {name: self.arrays[name] for name in ("colptr", "row")}
        other.__dict__ = {
            **self.__dict__,
            "data": Data(x=x, num_nodes=self.num_nodes),
            "attributes": [Attribute(None, "x", False)],
            "arrays": {**own, "x": x},
        }
        return other

    def _check_edges(self) -> None:
        """That every colptr rises and every row lies in range, before torch follows them."""
        for kind, e in self.graph.edges.items():
            source, target = self.graph.ends(kind)
            sizes = list(self.graph.num_nodes.values())
            who = f"Store {self.folder}"
            checks.pointers(who, _name(kind, "colptr"), e.colptr, sizes[target], e.row.numel())
            checks.in_range(who, _name(kind, "row"), e.row, sizes[source])

    def __repr__(self) -> str:
        return f"Store({str(self.folder)!r}, {self.num_nodes} nodes, {self.num_edges} edges, {self.nbytes} bytes)"

    def _map(self, entry: Entry, verify: bool) -> Tensor:
        path = self.folder / entry.file
        if entry.nbytes == 0 and path.is_file() and path.stat().st_size == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        flat = mapped(path, entry.dtype, entry.nbytes)
        if verify and _checksum(flat) != entry.checksum:
            fail(f"Store: {path} does not match its checksum: the file is damaged")
        return flat.view(entry.shape)

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
        for (name, tensor), file in zip(arrays.items(), _files(arrays), strict=True):
            entries.append(_write(partial / file, name, tensor, done, total, progress))
            done += entries[-1]["bytes"]
        meta = {
            "format": FORMAT,
            "node_types": [{"type": t, "num_nodes": graph.num_nodes[t]} for t in graph.node_types],
            "edge_types": graph.edge_types,
            "attributes": [{"type": a.type, "name": a.name, "of_edges": a.of_edges} for a in attributes],
            "arrays": entries,
        }
        with (partial / "meta.json").open("w") as out:
            json.dump(meta, out, indent=1)
            out.flush()
            os.fsync(out.fileno())
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(partial, folder)
        return Store(folder)


def mapped(path: Path, dtype: torch.dtype, nbytes: int | None = None) -> Tensor:
    """A file as a tensor, read page by page as it is asked for. What is written into it never reaches the file.

    nbytes: how many it must have. A link is refused: it may lead out of the store.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        fail(f"Store: {path} is missing")
    except OSError as error:
        fail(f"Store: {path} cannot be opened: {'it is a link' if path.is_symlink() else error.strerror}")
    with os.fdopen(descriptor, "rb"):
        status = os.fstat(descriptor)
        size = status.st_size
        expect(stat.S_ISREG(status.st_mode), f"Store: {path} is no file")
        if nbytes is not None and size != nbytes:
            fail(f"Store: {path} has {size} bytes, wanted {nbytes}: the file is truncated or not of this store")
        if not hasattr(mmap, "MAP_PRIVATE"):
            return torch.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY), dtype=dtype)
        # Nothing is set aside for copies of pages: a system would refuse to for a file larger than its memory.
        no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000) if sys.platform == "linux" else 0
        memory = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE | no_reserve, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(memory, dtype=dtype)


def _collect(data: Any, graph: GraphArrays, features: str) -> tuple[dict[str, Tensor], list[Attribute]]:
    """Every array to be written, by name, and the attributes among them; those of edges in CSC order."""
    arrays: dict[str, Tensor] = {}
    for kind, e in graph.edges.items():
        expect(_name(kind, "row") not in arrays, f"Store: two edge types are called {_name(kind, '')[:-1]!r} on disk")
        arrays[_name(kind, "colptr")], arrays[_name(kind, "row")] = e.colptr, e.row
    attributes = []
    for attribute, value in _attributes(data, graph):
        kind, name, key = attribute.type, attribute.name, _name(attribute.type, attribute.name)
        if value.layout != torch.strided or value.is_meta:
            fail(f"Store: attribute {name!r} is {checks.shape_of(value)}, wanted a dense tensor")
        known = str(value.dtype).removeprefix("torch.") in DTYPES
        expect(known, f"Store: attribute {name!r} is {value.dtype}, wanted one of {', '.join(DTYPES)}")
        taken = key in arrays or name.endswith(".scale")
        expect(not taken, f"Store: attribute {name!r} has a name that the store needs itself")
        order = graph.edges[kind].edge_id if attribute.of_edges else None
        arrays[key] = value if order is None else value[order.long()]
        attributes.append(attribute)
        if name == "x" and not attribute.of_edges:
            arrays.update({_name(kind, part): t for part, t in _stored(value, features).items()})
    return arrays, attributes


def _attributes(data: Any, graph: GraphArrays) -> Iterator[tuple[Attribute, Tensor]]:
    """The tensors that PyG takes for attributes of nodes or edges."""
    kinds = [*graph.node_types, *graph.edge_types] if graph.hetero else [None]
    for kind in kinds:
        store = data._store if kind is None else data[kind]
        asked = data if kind is None else store
        for name, value in store.items():
            if name in ("edge_index", "adj_t", "num_nodes") or not isinstance(value, Tensor):
                continue
            of_edges = isinstance(kind, tuple) or (kind is None and not data.is_node_attr(name))
            if asked.is_edge_attr(name) if of_edges else asked.is_node_attr(name):
                yield Attribute(kind, name, of_edges), value


def _one_each(values: Tensor, edges: EdgeArrays, name: str | None) -> Tensor:
    wanted = edges.row.numel()
    expect(values.numel() == wanted, f"Store: {name!r} has {values.numel()} values, wanted {wanted}, one for each edge")
    return values


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


def _stored(x: Tensor, features: str) -> dict[str, Tensor]:
    """x in the type it is stored in, with its scale where that is int8."""
    if features == "as is":
        return {"x": x}
    if features != "int8":
        return {"x": x.to(_FLOATS[features])}
    expect(x.dim() == 2, f"Store: features='int8' wants x of shape [nodes, columns], got {list(x.shape)}")
    scale = x.abs().amax(dim=0).float().clamp(min=torch.finfo(torch.float32).tiny) / 127
    return {"x": (x / scale).round().clamp(-127, 127).to(torch.int8), "x.scale": scale}


def _files(names: Iterable[str]) -> list[str]:
    """A file for each array: its name, of plain characters, and no two the same on any file system."""
    out: list[str] = []
    for name in names:
        file = re.sub(r"[^\w.-]", "_", name)[:100]
        while f"{file}.bin".lower() in {other.lower() for other in out}:
            file += "_"
        out.append(f"{file}.bin")
    return out


def _write(path: Path, name: str, tensor: Tensor, done: int, total: int, progress: Progress | None) -> dict[str, Any]:
    """One array to its file, chunk by chunk, and its line of meta.json."""
    tensor = tensor.detach().cpu().contiguous()
    flat = tensor.view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    with path.open("wb") as out:
        for start in range(0, flat.numel(), CHUNK):
            piece = flat[start : start + CHUNK]
            out.write(piece.numpy().data)
            if progress is not None:
                progress(done + start + piece.numel(), total)
        out.flush()
        os.fsync(out.fileno())
    return {
        "name": name,
        "file": path.name,
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
