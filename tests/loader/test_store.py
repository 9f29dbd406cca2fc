"""The store: what is written is what is read, in every type; damage is told; a half-written one is never opened."""

import json
import shutil

import pytest
import torch

from stretto.errors import StrettoError
from stretto.loader import NeighborLoader, Store
from tests.loader.data import homogeneous


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
        NeighborLoader(store, [2], time_attr="time")
    with pytest.raises(StrettoError, match="edge attribute"):
        NeighborLoader(store, [2], weight_attr="x")
    with pytest.raises(StrettoError, match="bidirectional"):
        next(iter(NeighborLoader(store, [2], subgraph_type="bidirectional")))
