"""`stretto convert`: a Data in a file, a graph by name, an .npz or an OGB folder becomes a Store on disk."""

import gzip
import importlib
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from torch_geometric.data import Data, HeteroData

from stretto.datasets import load_graph
from stretto.errors import expect, fail
from stretto.loader import Store
from stretto.loader.store import FEATURES

TRUST = "Read a .pt file that needs more than tensors and PyG's classes: it may then run any code."
# module -> PyG's classes that torch.save writes for a graph.
PLAIN = {
    "torch_geometric.data.data": ("Data", "DataTensorAttr", "DataEdgeAttr"),
    "torch_geometric.data.hetero_data": ("HeteroData",),
    "torch_geometric.data.storage": ("BaseStorage", "NodeStorage", "EdgeStorage", "GlobalStorage", "AttrType"),
    "torch_geometric.data.feature_store": ("TensorAttr",),
    "torch_geometric.data.graph_store": ("EdgeAttr", "EdgeLayout"),
    "torch_geometric.edge_index": ("EdgeIndex", "SortOrder", "CatMetadata"),
    "torch_geometric.index": ("Index", "CatMetadata"),
    "collections": ("OrderedDict",),
    "builtins": ("dict", "list", "set"),
}


def command(
    source: Annotated[
        str, typer.Argument(help="A .pt file with a Data or HeteroData, an .npz, an OGB folder, or a graph by name.")
    ],
    folder: Annotated[Path, typer.Argument(help="Where the store is written.")],
    features: Annotated[str, typer.Option(help=f"How x is stored: {', '.join(FEATURES)}.")] = "as is",
    overwrite: Annotated[bool, typer.Option(help="Replace a store that is there.")] = False,
    trust_pickle: Annotated[bool, typer.Option(help=TRUST)] = False,
) -> None:
    """Write a graph to a folder that stretto.loader.Store opens, memory-mapped."""
    out = Console()
    data = read(source, trust_pickle=trust_pickle)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"writing {folder}")
        store = Store.create(
            folder,
            data,
            features=features,
            overwrite=overwrite,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    out.print(
        f"{store.folder}: {store.num_nodes} nodes, {store.num_edges} edges, {store.nbytes / 1e6:.1f} MB", markup=False
    )


def read(source: str, *, trust_pickle: bool = False) -> Any:
    """The graph that `source` names, as a Data, or a HeteroData from a .pt file.

    trust_pickle: a .pt file may call whatever it names while it is read, which is as much as running a program.
    """
    path = Path(source)
    if path.is_dir():
        return read_ogb(path)
    if path.suffix == ".pt":
        return _graph_in(path, _unpickled(path, trust_pickle))
    found = load_graph(source)
    data = Data(edge_index=found.edge_index, num_nodes=found.num_nodes)
    if found.x is not None:
        data.x = found.x
    if found.y is not None:
        data.y = found.y
    for name, mask in found.masks.items():
        data[f"{name}_mask"] = mask
    return data


def _unpickled(path: Path, trust: bool) -> Any:
    """What torch.save has written. Unless it is trusted, only tensors, containers and PyG's own classes are made."""
    expect(path.is_file(), f"convert: no file {str(path)!r}")
    try:
        with _only(plain_classes()):
            return torch.load(path, map_location="cpu", weights_only=not trust)
    except Exception as error:  # a damaged file, or what it calls, may raise whatever there is
        foreign = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if foreign is None:
            fail(f"convert: {str(path)!r} cannot be read: {_said(error)}")
        fail(
            f"convert: {str(path)!r} names {foreign[1]}, wanted tensors, containers and PyG's classes of graphs alone: "
            "reading it may run any code. Where you trust whoever made it: --trust-pickle"
        )


def plain_classes() -> list[Any]:
    """PyG's classes that a graph in a file is made of, as far as this PyG has them: none runs what the file says."""
    found = []
    for module, names in PLAIN.items():
        there = vars(importlib.import_module(module))
        found += [there[name] for name in names if name in there]
    return [*found, (_no_default, "collections.defaultdict")]


def _no_default(*factory: Any) -> dict[Any, Any]:
    """A dictionary in place of a defaultdict, which torch does not fill: PyG remembers in one what is of nodes."""
    return {}


@contextmanager
def _only(allowed: list[Any]) -> Iterator[None]:
    """torch.load takes these alone, whatever else this process or its libraries have allowed."""
    serialization = torch.serialization
    before = serialization.get_safe_globals()
    serialization.clear_safe_globals()
    try:
        serialization.add_safe_globals(allowed)
        yield
    finally:
        serialization.clear_safe_globals()
        serialization.add_safe_globals(before)


def _said(error: Exception) -> str:
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def _graph_in(path: Path, content: Any) -> Data | HeteroData:
    """The graph that a file holds: itself, first of a tuple as PyG's datasets keep it, or as a dictionary."""
    data = content[0] if isinstance(content, tuple) and content else content
    try:
        data = Data.from_dict(data) if isinstance(data, dict) else data
        if isinstance(data, (Data, HeteroData)):
            for store in data.stores:
                vars(store).pop("_cached_attr", None)  # PyG finds out again
            data.to_dict()  # an old PyG's Data, or what only looks like one, has nothing to show
            return data
    except Exception as error:  # attributes of any kind
        fail(f"convert: {str(path)!r} holds no graph that this PyG reads: {_said(error)}")
    fail(f"convert: {path} holds {type(data).__name__}, wanted a Data or HeteroData")


def read_ogb(folder: Path) -> Data:
    """An OGB node-property folder: raw/*.csv.gz, or raw/data.npz and raw/node-label.npz, and split/*/*.csv.gz."""
    raw = folder / "raw"
    if (raw / "data.npz").is_file():
        arrays = np.load(raw / "data.npz")
        edge_index, x, n = arrays["edge_index"], arrays["node_feat"], int(arrays["num_nodes_list"][0])
        y = np.load(raw / "node-label.npz")["node_label"] if (raw / "node-label.npz").is_file() else None
    elif (raw / "edge.csv.gz").is_file():
        edge_index = _csv(raw / "edge.csv.gz", np.int64).T
        n = int(_csv(raw / "num-node-list.csv.gz", np.int64)[0, 0])
        x = _csv(raw / "node-feat.csv.gz", np.float32) if (raw / "node-feat.csv.gz").is_file() else None
        y = _csv(raw / "node-label.csv.gz", np.float64) if (raw / "node-label.csv.gz").is_file() else None
    else:
        fail(f"convert: {folder} is no OGB folder: it has neither raw/data.npz nor raw/edge.csv.gz")
    data = Data(edge_index=torch.from_numpy(np.ascontiguousarray(edge_index)), num_nodes=n)
    if x is not None:
        data.x = torch.from_numpy(np.ascontiguousarray(x))
    if y is not None:
        labels = torch.from_numpy(np.ascontiguousarray(y)).view(n, -1)
        labels = labels.nan_to_num(-1).long() if labels.is_floating_point() else labels
        data.y = labels.view(-1) if labels.size(1) == 1 else labels
    for part in ("train", "valid", "test"):
        for path in sorted(folder.glob(f"split/*/{part}.csv.gz")):
            mask = torch.zeros(n, dtype=torch.bool)
            mask[torch.from_numpy(_csv(path, np.int64).reshape(-1))] = True
            data[f"{'val' if part == 'valid' else part}_mask"] = mask
    return data


def _csv(path: Path, dtype: Any) -> np.ndarray:
    with gzip.open(path, "rt") as file:
        return np.loadtxt(file, delimiter=",", dtype=dtype, ndmin=2)
