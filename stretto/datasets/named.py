"""Graphs by name: `cora`, a path to `.npz`, a name in the data folder, or a random family such as `rmat:17:1200000`."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from stretto import settings
from stretto.datasets.families import er, grid, hub, rmat, star
from stretto.datasets.npz import Dataset, HeteroDataset, read_npz
from stretto.errors import fail

EMBEDDED = {"cora": Path(__file__).with_name("cora.npz")}

# family -> (its function, the words for its arguments)
FAMILIES: dict[str, tuple[Callable[..., tuple[Tensor, int]], tuple[str, ...]]] = {
    "rmat": (rmat, ("SCALE", "EDGES")),
    "er": (er, ("N", "E")),
    "star": (star, ("N",)),
    "grid": (grid, ("N",)),
    "hub": (hub, ("N", "E")),
}


def data_folder() -> Path | None:
    """Where further `.npz` graphs live: $STRETTO_DATA, or ../shared/data beside the checkout; None without one."""
    given = settings.get("STRETTO_DATA")
    folder = Path(given) if given else Path(__file__).resolve().parents[3] / "shared" / "data"
    return folder if folder.is_dir() else None


def names() -> list[str]:
    """Names of the stored graphs that `load` finds here: the embedded one, then those of the data folder."""
    folder = data_folder()
    return sorted({*EMBEDDED, *(path.stem for path in folder.glob("*.npz"))} if folder else EMBEDDED)


def load(name: str) -> Dataset | HeteroDataset:
    """The graph called `name`."""
    family, _, arguments = name.partition(":")
    if family in FAMILIES and arguments:
        return _random(name, family, arguments.split(":"))
    if name in EMBEDDED:
        return read_npz(EMBEDDED[name])
    if name.endswith(".npz"):
        return read_npz(name)
    folder = data_folder()
    if folder is not None and (folder / f"{name}.npz").is_file():
        return read_npz(folder / f"{name}.npz")
    fail(f"load: no graph {name!r}, wanted a path to .npz, one of {', '.join(names())}, or {', '.join(grammar())}")


def load_graph(name: str) -> Dataset:
    """The graph called `name`, which must have one type of nodes and edges."""
    data = load(name)
    if not isinstance(data, Dataset):
        fail(f"load_graph: {name!r} is heterogeneous, wanted one type of nodes and edges")
    return data


def grammar() -> list[str]:
    """How the random families are written."""
    return [":".join([family, *words]) for family, (_, words) in FAMILIES.items()]


def _random(name: str, family: str, arguments: list[str]) -> Dataset:
    make, words = FAMILIES[family]
    if len(arguments) != len(words) or not all(a.isdigit() for a in arguments):
        fail(f"load: {name!r} is not of the form {':'.join([family, *words])}")
    edge_index, num_nodes = make(*(int(a) for a in arguments))
    return Dataset(name=name, edge_index=edge_index, num_nodes=num_nodes)
