"""`stretto convert`: a Data in a file, a graph by name, an .npz or an OGB folder becomes a Store on disk."""

import gzip
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


def command(
    source: Annotated[
        str, typer.Argument(help="A .pt file with a Data or HeteroData, an .npz, an OGB folder, or a graph by name.")
    ],
    folder: Annotated[Path, typer.Argument(help="Where the store is written.")],
    features: Annotated[str, typer.Option(help=f"How x is stored: {', '.join(FEATURES)}.")] = "as is",
    overwrite: Annotated[bool, typer.Option(help="Replace a store that is there.")] = False,
) -> None:
    """Write a graph to a folder that stretto.loader.Store opens, memory-mapped."""
    out = Console()
    data = read(source)
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


def read(source: str) -> Any:
    """The graph that `source` names, as a Data, or a HeteroData from a .pt file."""
    path = Path(source)
    if path.is_dir():
        return read_ogb(path)
    if path.suffix == ".pt":
        data = torch.load(path, weights_only=False)
        data = data[0] if isinstance(data, tuple) else data
        if isinstance(data, dict):
            data = Data.from_dict(data)
        wanted = isinstance(data, (Data, HeteroData))
        expect(wanted, f"convert: {path} holds {type(data).__name__}, wanted a Data or HeteroData")
        return data
    found = load_graph(source)
    data = Data(edge_index=found.edge_index, num_nodes=found.num_nodes)
    if found.x is not None:
        data.x = found.x
    if found.y is not None:
        data.y = found.y
    for name, mask in found.masks.items():
        data[f"{name}_mask"] = mask
    return data


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
