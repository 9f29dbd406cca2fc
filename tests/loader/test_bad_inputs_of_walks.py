"""What random_walk would read wrongly is refused by name; walks of any weights end."""

import pytest
import torch

from stretto.errors import StrettoError
from stretto.loader import random_walk
from tests.loader.bad_values import COLPTR, INT, ROW, N, decreasing

RP, COL = COLPTR, ROW.long()
WALKS = [
    ({"start": torch.tensor([0.5])}, "'start' is float32"),
    ({"start": torch.tensor([True])}, "'start' is bool"),
    ({"start": torch.tensor([N])}, "'start' has node 40"),
    ({"start": torch.tensor([-1], dtype=torch.int8)}, "'start' has node -1"),
    ({"start": [0]}, "'start' is list"),
    ({"rowptr": RP.float()}, "'rowptr' is float32"),
    ({"rowptr": decreasing(RP)}, "'rowptr' decreases"),
    ({"rowptr": RP[:-1]}, "'rowptr' goes from 0"),
    ({"rowptr": torch.empty(0, dtype=INT)}, "'rowptr'"),
    ({"col": COL + N}, "'col' has node"),
    ({"col": COL[1:]}, "'rowptr' goes from 0 to 200"),
    ({"walk_length": 1.5}, "'walk_length' is 1.5"),
    ({"walk_length": -1}, "'walk_length' is -1"),
    ({"p": 5e-324}, "'p' is"),
    ({"q": float("inf")}, "'q' is inf"),
    ({"q": float("nan")}, "'q' is nan"),
    ({"p": "1"}, "'p' is '1'"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WALKS)))
def test_random_walk(number):
    change, text = WALKS[number]
    arguments = {"rowptr": RP, "col": COL, "start": torch.arange(4), "walk_length": 3, **change}
    with pytest.raises(StrettoError, match=text):
        random_walk(**arguments)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_walks_start_where_they_are_told(dtype):
    walks = random_walk(RP.int(), COL.int(), torch.arange(N, dtype=dtype), 2)
    assert walks[:, 0].tolist() == list(range(N))
    RP_edited = RP.clone()
    random_walk(RP_edited, COL, torch.arange(3), 2)
    RP_edited[1] = 2**40
    with pytest.raises(StrettoError, match="'rowptr' decreases"):
        random_walk(RP_edited, COL, torch.arange(3), 2)


@pytest.mark.parametrize(("p", "q"), [(1e-300, 1.0), (1e300, 1.0), (1.0, 1e-300), (1.0, 1e300), (1e-300, 1e300)])
def test_walks_of_any_weights_end(p, q):
    """0 and 1 know each other and 2; 3 hangs on 1: the second step goes where its weight says, if only a little."""
    rowptr, col = torch.tensor([0, 2, 5, 7, 8]), torch.tensor([1, 2, 0, 2, 3, 0, 1, 1])
    walks = random_walk(rowptr, col, torch.zeros(500, dtype=INT), 2, p, q)
    by_way = walks[walks[:, 1] == 1, 2]  # from 0 to 1: back to 0 by 1 / p, 2 by 1, 3 by 1 / q
    weight = {0: 1 / p, 2: 1.0, 3: 1 / q}
    likely = {node for node, w in weight.items() if w == max(weight.values())}
    assert set(by_way.tolist()) == likely
