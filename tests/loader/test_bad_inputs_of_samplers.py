"""What the native sampler would read wrongly is refused by name before it is read: relations, slices and seeds.

`random_calls.py` makes the same kinds of calls at random.
"""

import pytest
import torch

from stretto.errors import StrettoError
from stretto.loader.engine import Engine
from stretto.loader.native_sampler import Sampling, Slice
from tests.loader.bad_values import COLPTR, INT, ORDER, ROW, E, N, X, decreasing, gone, native, with_value

RELATIONS = [
    ({"colptr": COLPTR.int()}, "'colptr' is int32"),
    ({"colptr": COLPTR[:-1]}, "'colptr' has shape"),
    ({"colptr": COLPTR + 1}, "'colptr' goes from 1"),
    ({"colptr": decreasing(COLPTR)}, "colptr decreases"),
    ({"colptr": torch.stack([COLPTR, COLPTR], 1)[:, 0]}, "'colptr' is int64 of shape .* with strides"),
    ({"colptr": COLPTR.to("meta")}, "'colptr' is int64 of shape .* on meta"),
    ({"colptr": gone(COLPTR)}, "'colptr'"),
    ({"colptr": COLPTR.tolist()}, "'colptr' is list"),
    ({"row": ROW[:-1]}, f"to {E}, wanted from 0 to {E - 1}"),
    ({"row": ROW.short()}, "'row' is int16"),
    ({"row": ROW.float()}, "'row' is float32"),
    ({"row": ROW.view(2, -1)}, "'row' is int32 of shape"),
    ({"row": with_value(ROW, -1)}, "comes from node -1"),
    ({"row": with_value(ROW.long(), 2**40)}, "comes from node"),
    ({"row": gone(ROW)}, "'row'"),
    ({"edge_id": ORDER[:-1]}, "'edge_id'"),
    ({"edge_id": ORDER.short()}, "'edge_id' is int16"),
    ({"edge_id": ORDER.expand(2, -1).t()[:, 0][::2]}, "'edge_id'"),
    ({"time": torch.zeros(E - 1, dtype=INT), "flags": Sampling.DISJOINT}, "'time'"),
    ({"time": torch.zeros(E), "flags": Sampling.DISJOINT}, "'time' is float32"),
    ({"running": torch.zeros(E - 1, dtype=torch.float64)}, "'running'"),
    ({"running": torch.zeros(E)}, "'running' is float32"),
    ({"source": 1}, "'source' is 1"),
    ({"target": -1}, "'target' is -1"),
    ({"num_nodes": -1}, "'num_nodes' is -1"),
    ({"num_nodes": 2.5}, "'num_nodes' is 2.5"),
    ({"hops": -1}, "'num_hops' is -1"),
    ({"fanout": (3,)}, "hops"),
    ({"fanout": (3, -2)}, "'fanout' is -2"),
    ({"fanout": (3, 2**60), "flags": Sampling.REPLACE}, "'fanout' is 1152921504606846976"),
    ({"fanout": (3, 1.5)}, "'fanout' is 1.5"),
    ({"flags": Sampling.CSR | Sampling.LAYERED}, "CSR and LAYERED"),
    ({"slices": [Slice(X[:-1])]}, f"39 rows, wanted {N}"),
    ({"slices": [Slice(X.t())]}, "6 rows|side by side"),
    ({"slices": [Slice(X[:, ::2])]}, "side by side"),
    ({"slices": [Slice(X.to("meta"))]}, "on meta"),
    ({"slices": [Slice(X.to_sparse())]}, "sparse_coo"),
    ({"slices": [Slice(gone(X))]}, "'value'"),
    ({"slices": [Slice(torch.tensor(1.0))]}, "'value'"),
    ({"slices": [Slice(X, type=1)]}, "'type' is 1"),
    ({"slices": [Slice(X, of_edges=True)]}, f"wanted {E}"),
    ({"slices": [Slice(torch.zeros(E, 2), of_edges=True)], "edge_id": ORDER + 1}, "edge ids of value"),
    ({"slices": [Slice(X, scale=torch.ones(6))]}, "wanted int8"),
    ({"slices": [Slice(X.to(torch.int8), scale=torch.ones(5))]}, "value.scale"),
    ({"slices": [Slice(X.to(torch.int8), scale=torch.ones(6).double())]}, "value.scale"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(RELATIONS)))
def test_native_sampler(number):
    arguments, text = RELATIONS[number]
    with pytest.raises(StrettoError, match=text):
        native(**arguments)


SEEDS = [
    ([torch.tensor([0.5])], [None], "'seeds' is float32"),
    ([torch.tensor([True])], [None], "'seeds' is bool"),
    ([torch.tensor([[0]])], [None], "'seeds' is int64 of shape"),
    ([torch.tensor([0], device="meta")], [None], "on meta"),
    ([torch.tensor([N])], [None], f"seed {N} is not a node"),
    ([torch.tensor([-(2**63)])], [None], "is not a node"),
    ([torch.tensor([0]), torch.tensor([0])], [None, None], "2 node types, wanted 1"),
    ([], [], "0 node types"),
    ([torch.tensor([0, 1])], [torch.tensor([5])], "2 seeds, but 1 times"),
    ([torch.tensor([0])], [torch.tensor([5.0])], "'times' is float32"),
]


@pytest.mark.parametrize("number", range(len(SEEDS)))
def test_seeds_of_a_batch(number):
    seeds, times, text = SEEDS[number]
    sampler = native()
    engine = Engine(sampler, threads=1, memory=1 << 20)
    with pytest.raises(StrettoError, match=text):
        sampler.sample(0, 0, 0, seeds, times)
    with pytest.raises(StrettoError, match=text):
        (engine.submit(0, 0, 0, seeds, times), engine.next())
    assert sampler.sample(0, 0, 0, [torch.tensor([3])], [None]).n_id()[0] == 3
