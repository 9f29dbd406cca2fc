"""The store: what is written is what is read, in every type; damage is told; a half-written one is never opened."""

import json
import os
import shutil

import pytest
import torch

from stretto.errors import StrettoError
from stretto.loader import NeighborLoader, Store
from stretto.loader.store import mapped
from tests.loader.data import check_hetero, heterogeneous, homogeneous


def data_of_store(seed: int = 0):
    data = homogeneous(seed=seed)
    del data["transposed"]
    del data["name"]
    del data["scalar"]
    return data


def test_batches_from_disk_equal_the_data(tmp_path):
    data = data_of_store()
    seen = []
    store = Store.create(tmp_path / "s", data, progress=lambda done, total: seen.append((done, total)))
    assert seen
    assert seen[-1][0] == seen[-1][1]
    order = torch.argsort(data.edge_index[1], stable=True)
    count = 0
    for batch in NeighborLoader(Store(tmp_path / "s"), [4, 3], batch_size=32, num_threads=2, shuffle=True):
        assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, order[batch.e_id]])
        assert torch.equal(batch.edge_attr, data.edge_attr[order[batch.e_id]])
        for key in ("x", "y", "time", "train_mask"):
            assert torch.equal(batch[key], data[key][batch.n_id])
        count += batch.batch_size
    assert count == 300
    assert "300 nodes" in repr(store)
    single = NeighborLoader(store, [4], batch_size=10, input_nodes=torch.arange(50))(torch.tensor([3, 4]))
    assert single.n_id[:2].tolist() == [3, 4]
    assert torch.equal(single.x, data.x[single.n_id])
    weighted = next(iter(NeighborLoader(store, [2], batch_size=10, weight_attr="edge_weight")))
    assert weighted.num_edges > 0


@pytest.mark.parametrize(
    ("features", "dtype", "tolerance"),
    [
        ("fp32", torch.float32, 0),
        ("fp16", torch.float16, 2e-3),
        ("bf16", torch.bfloat16, 2e-2),
        ("int8", torch.float32, 2e-2),
    ],
)
def test_feature_types(tmp_path, features, dtype, tolerance):
    data = data_of_store()
    store = Store.create(tmp_path / "s", data, features=features)
    batch = next(iter(NeighborLoader(store, [4], batch_size=100)))
    assert batch.x.dtype == dtype
    assert torch.allclose(batch.x.float(), data.x[batch.n_id], atol=tolerance * 4)
    assert store.arrays["x"].element_size() == {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}[features]


@pytest.mark.parametrize("time_attr", ["time", "edge_time"])
@pytest.mark.parametrize("strategy", ["uniform", "last"])
@pytest.mark.parametrize("weighted", [False, True])
def test_temporal_batches_from_disk(tmp_path, time_attr, strategy, weighted):
    """The very batches of the same graph in memory; nothing is younger than its seed."""
    if weighted and strategy == "last":
        pytest.skip("the last edges are no draw: weights mean nothing there")
    store = Store.create(tmp_path / "s", data_of_store())
    data = store.load()
    options = {
        "time_attr": time_attr, "temporal_strategy": strategy, "batch_size": 40, "num_threads": 2,
        "weight_attr": "edge_weight" if weighted else None,
    }  # fmt: skip
    if time_attr == "edge_time":
        options["input_time"] = torch.full((300,), 60)
    for source in (store, data):
        torch.manual_seed(3)
        batches = list(NeighborLoader(source, [4, 3], **options))
        if source is store:
            found = batches
            continue
        for ours, theirs in zip(found, batches, strict=True):
            assert torch.equal(ours.n_id, theirs.n_id)
            assert torch.equal(ours.edge_index, theirs.edge_index)
            assert torch.equal(ours.e_id, theirs.e_id)
            assert torch.equal(ours.x, data.x[ours.n_id])
            assert torch.equal(ours.edge_attr, data.edge_attr[ours.e_id])
            seeds = ours.n_id[: ours.batch_size]
            limit = (data.time[seeds] if time_attr == "time" else ours.seed_time)[ours.batch[ours.edge_index[1]]]
            at = data.edge_time[ours.e_id] if time_attr == "edge_time" else data.time[ours.n_id[ours.edge_index[0]]]
            assert bool((at <= limit).all())
    assert sum(b.num_edges for b in found) > 0


@pytest.mark.parametrize("time_attr", [None, "time"])
@pytest.mark.parametrize("features", ["as is", "int8"])
def test_heterogeneous_batches_from_disk(tmp_path, time_attr, features):
    given = heterogeneous()
    store = Store.create(tmp_path / "s", given, features=features)
    data = store.load()
    for kind in given.node_types:
        assert data[kind].num_nodes == given[kind].num_nodes
        if "x" in given[kind]:
            assert torch.allclose(data[kind].x, given[kind].x, atol=0 if features == "as is" else 4e-2)
    for kind in given.edge_types:
        order = torch.argsort(given[kind].edge_index[1], stable=True)
        assert torch.equal(data[kind].edge_index, given[kind].edge_index[:, order])
        assert torch.equal(data[kind].edge_attr, given[kind].edge_attr[order])
    seeds = ("paper", torch.arange(0, 200, 3))
    count = 0
    torch.manual_seed(5)
    from_disk = list(
        NeighborLoader(store, [4, 3], input_nodes=seeds, batch_size=16, num_threads=2, time_attr=time_attr)
    )
    torch.manual_seed(5)
    in_memory = list(NeighborLoader(data, [4, 3], input_nodes=seeds, batch_size=16, num_threads=2, time_attr=time_attr))
    for ours, theirs in zip(from_disk, in_memory, strict=True):
        check_hetero(ours, data)
        for kind in data.node_types:
            assert torch.equal(ours[kind].n_id, theirs[kind].n_id)
        for kind in data.edge_types:
            assert torch.equal(ours[kind].edge_index, theirs[kind].edge_index)
        count += ours["paper"].batch_size
    assert count == 67
    with pytest.raises(StrettoError, match="one node type"):
        store.with_features(torch.zeros(1, 1))


def test_damage_is_told(tmp_path):
    store = Store.create(tmp_path / "s", data_of_store())
    for name in ("x.bin", "row.bin", "colptr.bin", "edge_attr.bin"):
        path = store.folder / name
        good = path.read_bytes()
        flipped = bytearray(good)
        flipped[len(good) // 2] ^= 1
        path.write_bytes(bytes(flipped))
        with pytest.raises(StrettoError, match=f"{name} does not match its checksum"):
            Store(store.folder)
        path.write_bytes(good[:-3])
        with pytest.raises(StrettoError, match=f"{name} has .* truncated"):
            Store(store.folder, verify=False)
        path.write_bytes(good)
    (store.folder / "y.bin").unlink()
    with pytest.raises(StrettoError, match=r"y\.bin is missing"):
        Store(store.folder)
    (store.folder / "meta.json").write_text("{not json")
    with pytest.raises(StrettoError, match="cannot be read"):
        Store(store.folder)
    (store.folder / "meta.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(StrettoError, match="format"):
        Store(store.folder)
    with pytest.raises(StrettoError, match="no store"):
        Store(tmp_path)


def test_a_crash_while_writing_leaves_nothing_that_opens(tmp_path):
    class Crash(Exception):
        pass

    def crash(done, total):
        if done > total // 2:
            raise Crash

    with pytest.raises(Crash):
        Store.create(tmp_path / "s", data_of_store(), progress=crash)
    assert not (tmp_path / "s").exists()
    with pytest.raises(StrettoError, match="no store"):
        Store(tmp_path / "s.partial")
    first = Store.create(tmp_path / "s", data_of_store())  # the rest of the crash is swept away
    assert not (tmp_path / "s.partial").exists()
    with pytest.raises(Crash):
        Store.create(tmp_path / "s", data_of_store(1), overwrite=True, progress=crash)
    assert torch.equal(Store(tmp_path / "s").arrays["x"], first.arrays["x"])  # the old one is whole
    with pytest.raises(StrettoError, match="exists"):
        Store.create(tmp_path / "s", data_of_store())
    shutil.rmtree(tmp_path / "s.partial")


def test_bad_arguments(tmp_path):
    with pytest.raises(StrettoError, match="features"):
        Store.create(tmp_path / "s", data_of_store(), features="fp8")
    store = Store.create(tmp_path / "s", data_of_store())
    with pytest.raises(StrettoError, match="time_attr"):
        NeighborLoader(store, [2], time_attr="moon")
    with pytest.raises(StrettoError, match="wanted integers"):
        NeighborLoader(store, [2], time_attr="edge_weight")
    with pytest.raises(StrettoError, match="edge attribute"):
        NeighborLoader(store, [2], weight_attr="x")
    with pytest.raises(StrettoError, match="bidirectional"):
        next(iter(NeighborLoader(store, [2], subgraph_type="bidirectional")))


def test_a_file_larger_than_memory_is_mapped(tmp_path):
    path, size = tmp_path / "x.bin", 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with path.open("wb") as file:
        file.truncate(size)  # nothing of it takes room on the disk
    x = mapped(path, torch.float32)
    assert x.numel() == size // 4
    x[-1] = 1.0
    assert x[-1] == 1.0
    del x
    assert mapped(path, torch.float32)[-1] == 0.0
    path.unlink()  # whoever copies the folder would copy all of it
