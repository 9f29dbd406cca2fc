"""Views are read with their strides and offsets, and what was replaced between passes is seen."""

import pytest
import torch

from stretto.loader import NeighborLoader, Store
from stretto.loader.native_sampler import Slice
from tests.loader.bad_values import GENERATOR, E, N, X, data, native

VIEWS = {
    "every second column": lambda: torch.rand(N, 12)[:, ::2],
    "transposed": lambda: torch.rand(6, N).t(),
    "some columns": lambda: torch.rand(N, 12)[:, 3:9],
    "one column": lambda: torch.rand(N, 12)[:, 4:5],
    "a column": lambda: torch.rand(N, 12)[:, 4],
    "every second row": lambda: torch.rand(2 * N, 6)[::2],
    "backwards": lambda: torch.rand(N, 6).flip(0),
    "one row for all": lambda: torch.rand(1, 6).expand(N, 6),
    "one column for all": lambda: torch.rand(N, 1).expand(N, 6),
    "one value for all": lambda: torch.rand(1, 1).expand(N, 6),
    "with an offset": lambda: torch.rand(N + 7, 6)[7:],
    "three dimensions": lambda: torch.rand(N, 5, 4)[:, 1:3],
    "no columns": lambda: torch.rand(N, 0),
    "half a type": lambda: torch.randint(0, 9, (N, 6), dtype=torch.int16)[:, :3],
    "imaginary": lambda: torch.rand(N, 6, dtype=torch.complex64).conj(),
    "negative": lambda: torch.rand(N, 6, dtype=torch.complex64).conj().imag,
    "a parameter": lambda: torch.nn.Parameter(torch.rand(N, 6)),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store.create(tmp_path_factory.mktemp("store") / "s", data())


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_read_as_they_are(view, store):
    x, wide = VIEWS[view](), torch.rand(2 * E, 8)
    for batch in NeighborLoader(data(x=x, edge_attr=wide[::2, 1:4]), [3, 2], batch_size=16):
        assert torch.equal(batch.x, x[batch.n_id])
        assert torch.equal(batch.edge_attr, wide[::2, 1:4][batch.e_id])
    if x.is_conj() or x.is_neg():
        return
    for batch in NeighborLoader(store.with_features(x), [3, 2], batch_size=16):
        assert torch.equal(batch.x, x[batch.n_id])


def test_views_of_many_rows_are_streamed_with_their_stride():
    x = torch.rand(N, 300)[:, 100:200]
    seeds = torch.randint(0, N, ((9 << 20) // 400,), generator=GENERATOR)
    slot = native(slices=[Slice(x)], fanout=(0, 0)).sample(0, 0, 0, [seeds], [None])
    assert torch.equal(slot.slice(0), x[seeds])


def test_what_was_replaced_between_passes_is_seen():
    given = data()
    loader = NeighborLoader(given, [3], batch_size=16)

    def right():
        for batch in loader:
            check_all(batch, given)

    right()
    for change in (
        lambda: given.__setattr__("x", torch.rand(N, 3)),
        lambda: given.x.mul_(2),
        lambda: setattr(given.x, "data", torch.rand(N, 3)),
        lambda: given.x.set_(torch.rand(N, 5)),
        lambda: given.x.resize_(N, 2),
        lambda: given.__setattr__("z", torch.rand(N, 2)),
        lambda: given.__delattr__("z"),
        lambda: given.__setattr__("edge_attr", torch.rand(E, 1)),
        lambda: given.__setattr__("x", torch.rand(N, 3)[:, ::2]),
    ):
        change()
        right()


def check_all(batch, given):
    assert ("z" in batch) == ("z" in given)
    for name in ("x", "y", "z"):
        if name in given:
            assert torch.equal(batch[name], given[name][batch.n_id]), name
    assert torch.equal(batch.edge_attr, given.edge_attr[batch.e_id])


def test_memory_that_threads_read_is_not_moved_by_torch():
    given = data(x=X.clone())
    iterator = iter(NeighborLoader(given, [3], batch_size=4))
    next(iterator)
    with pytest.raises(RuntimeError, match="not resizable"):
        given.x.resize_(100 * N, 6)
    for batch in iterator:
        assert torch.equal(batch.x, X[batch.n_id])
