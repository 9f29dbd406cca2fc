"""What meta.json of a Store says, read and checked: whoever wrote it, it names nothing but the store's own arrays.

A name of a file is a name in the store's folder: no path, no `..`, no link. Sizes, types and shapes agree with each
other before a file is mapped; whether they agree with the files is seen as these are opened (store.py).
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from stretto.errors import StrettoError, fail

FORMAT = 2
DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
    )
}  # fmt: skip
_FIELDS = ("node_types", "edge_types", "attributes", "arrays")


@dataclass(frozen=True)
class Attribute:
    """An attribute of a node type or an edge type; None is the only one."""

    type: Any
    name: str
    of_edges: bool


@dataclass(frozen=True)
class Entry:
    """One array: a file of the folder, and what is in it."""

    name: str
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    checksum: str


@dataclass(frozen=True)
class Meta:
    """All that meta.json says."""

    num_nodes: dict[Any, int]
    edge_types: list[Any]
    attributes: list[Attribute]
    entries: list[Entry]


def read(folder: Path) -> Meta:
    """The meta.json of a folder; an error that says what of it is wrong."""
    path = folder / "meta.json"
    if not path.is_file():
        fail(f"Store: {folder} is no store: it has no meta.json")
    try:
        said = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:  # what is no JSON, or no text
        raise StrettoError(f"Store: {path} cannot be read: {error}") from error
    form = said.get("format") if isinstance(said, dict) else None
    if type(form) is not int or form != FORMAT:
        fail(f"Store: {path} has format {form!r}, wanted {FORMAT}")
    for name in _FIELDS:
        if not isinstance(said.get(name), list):
            fail(f"Store: {path}: {name!r} is {_kind(said.get(name))}, wanted a list")
    reader = _Reader(path)
    num_nodes = reader.node_types(said["node_types"])
    edge_types = reader.edge_types(said["edge_types"], num_nodes)
    attributes = [reader.attribute(a, num_nodes, edge_types) for a in said["attributes"]]
    return Meta(num_nodes, edge_types, attributes, reader.entries(said["arrays"]))


def _kind(value: Any) -> str:
    return "missing" if value is None else type(value).__name__


class _Reader:
    """Reads the parts of one meta.json, whose path errors name."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def node_types(self, said: list[Any]) -> dict[Any, int]:
        out: dict[Any, int] = {}
        for entry in said:
            name = self.field(entry, "type", (str, type(None)))
            if name in out or (name is None and len(said) != 1):
                self.wrong(f"node type {name!r} is there twice, or is not the only one")
            out[name] = self.size(entry, "num_nodes")
        if not out:
            self.wrong("there is no node type")
        return out

    def edge_types(self, said: list[Any], num_nodes: dict[Any, int]) -> list[Any]:
        out: list[Any] = []
        for entry in said:
            kind = tuple(entry) if isinstance(entry, list) else entry
            if None in num_nodes:
                fits = kind is None
            else:
                fits = isinstance(kind, tuple) and len(kind) == 3 and all(isinstance(part, str) for part in kind)
                fits = fits and kind[0] in num_nodes and kind[2] in num_nodes
            if not fits or kind in out:
                self.wrong(f"edge type {entry!r} joins no two node types of {list(num_nodes)}, or is there twice")
            out.append(kind)
        if None in num_nodes and not out:
            self.wrong("there is no edge type")
        return out

    def attribute(self, said: Any, num_nodes: dict[Any, int], edge_types: list[Any]) -> Attribute:
        kind, name = self.field(said, "type", (str, list, type(None))), self.field(said, "name", (str,))
        kind = tuple(kind) if isinstance(kind, list) else kind
        of_edges = self.field(said, "of_edges", (bool,))
        if kind not in (edge_types if of_edges else list(num_nodes)):
            self.wrong(f"attribute {name!r} is of {kind!r}, which is no {'edge' if of_edges else 'node'} type")
        return Attribute(kind, name, of_edges)

    def entries(self, said: list[Any]) -> list[Entry]:
        out = [self.entry(one) for one in said]
        for field in ("name", "file"):
            values = [getattr(entry, field) for entry in out]
            if len(set(values)) < len(values):
                self.wrong(f"two arrays have the same {field}")
        return out

    def entry(self, said: Any) -> Entry:
        name, file = self.field(said, "name", (str,)), self.field(said, "file", (str,))
        if file in ("", ".", "..", "meta.json") or any(c in file for c in "/\\\0:"):
            self.wrong(f"array {name!r} is in file {file!r}, wanted the name of a file in the store's own folder")
        dtype, shape = self.field(said, "dtype", (str,)), self.field(said, "shape", (list,))
        if dtype not in DTYPES:
            self.wrong(f"array {name!r} has dtype {dtype!r}, wanted one of {', '.join(DTYPES)}")
        if not shape or any(type(extent) is not int or not 0 <= extent < 2**63 for extent in shape):
            self.wrong(f"array {name!r} has shape {shape!r}, wanted a list of whole numbers")
        nbytes = self.size(said, "bytes")
        if math.prod(shape) * DTYPES[dtype].itemsize != nbytes:
            self.wrong(f"array {name!r} has {nbytes} bytes, wanted those of shape {shape} of {dtype}")
        return Entry(name, file, DTYPES[dtype], tuple(shape), nbytes, self.field(said, "checksum", (str,)))

    def size(self, said: Any, name: str) -> int:
        value = self.field(said, name, (int,))
        if type(value) is not int or not 0 <= value < 2**62:
            self.wrong(f"{name!r} is {value!r}, wanted a whole number below 2^62")
        return int(value)

    def field(self, said: Any, name: str, types: tuple[type, ...]) -> Any:
        if not isinstance(said, dict) or name not in said or not isinstance(said[name], types):
            value = said.get(name) if isinstance(said, dict) else said
            self.wrong(f"{name!r} is {_kind(value)}, wanted {' or '.join(t.__name__ for t in types)}")
        return said[name]

    def wrong(self, what: str) -> NoReturn:
        fail(f"Store: {self.path}: {what}")
