"""A store whose files or meta.json lie is refused by name before what lies is followed."""

import json
import os
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData

from stretto.errors import StrettoError
from stretto.loader import NeighborLoader, Store
from tests.loader.bad_values import X, data, first, gone


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store.create(tmp_path_factory.mktemp("store") / "s", data())


def edited(change):
    """An edit of meta.json."""
    return lambda folder: _rewrite(folder, change)


def _rewrite(folder, change):
    path = folder / "meta.json"
    meta = json.loads(path.read_text())
    change(meta)
    path.write_text(json.dumps(meta))


def array(meta, name):
    return next(a for a in meta["arrays"] if a["name"] == name)


def resized(name, rows):
    """An array with other rows, in meta.json and in its file, so that sizes and checksums agree."""

    def change(folder):
        path = folder / f"{name}.bin"

        def edit(meta):
            entry = array(meta, name)
            size = entry["bytes"] // entry["shape"][0]
            entry["shape"][0], entry["bytes"] = rows, rows * size
            path.write_bytes(path.read_bytes()[: rows * size].ljust(rows * size, b"\0"))

        _rewrite(folder, edit)

    return change


def linked(folder):
    shutil.copy(folder / "x.bin", folder.parent / "elsewhere.bin")
    (folder / "x.bin").unlink()
    (folder / "x.bin").symlink_to(folder.parent / "elsewhere.bin")


def piped(folder):
    (folder / "x.bin").unlink()
    os.mkfifo(folder / "x.bin")


STORES = {
    "more rows than the file": (edited(lambda m: array(m, "x").update(shape=[10**9, 6])), "has 960 bytes, wanted"),
    "more bytes than the file": (edited(lambda m: array(m, "x").update(shape=[400, 6], bytes=9600)), "truncated"),
    "more nodes": (edited(lambda m: m["node_types"][0].update(num_nodes=10**9)), "wanted \\[1000000001\\]"),
    "x, short": (resized("x", 10), "'x' has 10 rows, wanted 40"),
    "y, long": (resized("y", 80), "'y' has 80 rows"),
    "row, short": (resized("row", 100), "'colptr' goes from 0 to 200, wanted from 0 to 100"),
    "colptr, short": (resized("colptr", 10), "'colptr' has shape"),
    "edge_attr, short": (resized("edge_attr", 100), "'edge_attr' has 100 rows"),
    "absolute path": (edited(lambda m: array(m, "x").update(file="/etc/passwd")), "own folder"),
    "path upwards": (edited(lambda m: array(m, "x").update(file="../elsewhere.bin")), "own folder"),
    "folder itself": (edited(lambda m: array(m, "x").update(file="..")), "own folder"),
    "no name": (edited(lambda m: array(m, "x").update(file="")), "own folder"),
    "link": (linked, "it is a link"),
    "pipe": (piped, "is no file"),
    "two arrays of one file": (edited(lambda m: array(m, "x").update(file="y.bin")), "same file"),
    "two arrays of one name": (edited(lambda m: m["arrays"].append(m["arrays"][0])), "same name"),
    "dtype": (edited(lambda m: array(m, "x").update(dtype="float8")), "has dtype 'float8'"),
    "dtype of colptr": (edited(lambda m: array(m, "colptr").update(dtype="float64")), "'colptr' is float64"),
    "dtype of row": (edited(lambda m: array(m, "row").update(dtype="float32")), "'row' is float32"),
    "shape": (edited(lambda m: array(m, "x").update(shape=[-40, -6])), "whole numbers"),
    "shape of floats": (edited(lambda m: array(m, "x").update(shape=[40.0, 6])), "whole numbers"),
    "bytes": (edited(lambda m: array(m, "x").update(bytes=True)), "'bytes' is True"),
    "scale": (
        edited(lambda m: m["arrays"].append({**array(m, "y"), "name": "x.scale", "file": "z.bin"})), "z.bin is missing",
    ),
    "arrays": (edited(lambda m: m.update(arrays={})), "'arrays' is dict"),
    "an array": (edited(lambda m: m["arrays"].append(3)), "'name' is int"),
    "no row": (edited(lambda m: m.update(arrays=[a for a in m["arrays"] if a["name"] != "row"])), "no array 'row'"),
    "no x": (edited(lambda m: m.update(arrays=[a for a in m["arrays"] if a["name"] != "x"])), "no array 'x'"),
    "node types": (edited(lambda m: m.update(node_types=[])), "no node type"),
    "num_nodes": (edited(lambda m: m["node_types"][0].update(num_nodes="40")), "'num_nodes' is str"),
    "edge types": (edited(lambda m: m.update(edge_types=[["a", "b", "c"]])), "joins no two node types"),
    "no edge types": (edited(lambda m: m.update(edge_types=[])), "no edge type"),
    "attribute": (edited(lambda m: m["attributes"][0].update(type="paper")), "which is no node type"),
    "of_edges": (edited(lambda m: m["attributes"][0].update(of_edges=1)), "'of_edges' is int"),
    "format": (edited(lambda m: m.update(format=True)), "format True"),
    "a list": (lambda folder: (folder / "meta.json").write_text("[]"), "format None"),
    "deep": (lambda folder: (folder / "meta.json").write_text("[" * 10**5), "cannot be read"),
    "no text": (lambda folder: (folder / "meta.json").write_bytes(b"\xff\xfe\x00"), "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", STORES)
def test_a_store_that_lies_is_not_opened(name, store, tmp_path):
    change, text = STORES[name]
    folder = shutil.copytree(store.folder, tmp_path / "s")
    change(folder)
    with pytest.raises(StrettoError, match=text):
        Store(folder, verify=False)


def batch_of(opened):
    return first(NeighborLoader(opened, [2]))


def test_indices_that_lie_are_told_before_they_are_followed(store, tmp_path):
    for name, text in (("colptr", "decreases"), ("row", "comes from node|has node")):
        folder = shutil.copytree(store.folder, tmp_path / name)
        dtype = np.int64 if name == "colptr" else np.int32
        values = np.fromfile(folder / f"{name}.bin", dtype)
        values[1] = 10**8
        values.tofile(folder / f"{name}.bin")
        opened = Store(folder, verify=False)
        for call in (opened.load, partial(batch_of, opened), partial(opened.read, weight_attr="edge_attr")):
            with pytest.raises(StrettoError, match=text):
                call()
        with pytest.raises(StrettoError, match="checksum"):
            Store(folder)


def test_scales_and_features_of_a_store(tmp_path, store):
    small = Store.create(tmp_path / "small", data(), features="int8")
    path = small.folder / "meta.json"
    _rewrite(small.folder, lambda m: array(m, "x.scale").update(shape=[3], bytes=12))
    (small.folder / "x.scale.bin").write_bytes(b"\0" * 12)
    with pytest.raises(StrettoError, match=r"x\.scale"):
        Store(small.folder, verify=False)
    assert path.is_file()
    for bad in (X[:-1], X.to("meta"), X.to_sparse(), X.tolist(), torch.tensor(1.0), gone(X), None):
        with pytest.raises(StrettoError, match="Store: 'x' is"):
            store.with_features(bad)
    for bad, text in ((X.to("meta"), "dense"), (X.to_sparse(), "dense"), (X.to(torch.complex64), "complex64")):
        with pytest.raises(StrettoError, match=text):
            Store.create(tmp_path / "bad", data(x=bad))


def test_names_that_look_alike_have_files_of_their_own(tmp_path):
    given = HeteroData()
    for kind, name in (("a", "b_x"), ("a_b", "x"), ("A_b", "x"), ("../up", "x"), ("c:d", "x")):
        given[kind][name], given[kind].num_nodes = torch.rand(3, 2), 3
    given["a", "to", "a_b"].edge_index = torch.tensor([[0], [1]])
    loaded = Store.create(tmp_path / "s", given).load()
    for kind in given.node_types:
        for name in set(given[kind].keys()) - {"num_nodes"}:
            assert torch.equal(loaded[kind][name], given[kind][name])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s"]
