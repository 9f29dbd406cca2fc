"""stretto.forget(): the edits behind torch's back that docs/all_of_stretto.md names are seen after it."""

import pytest
import torch
import torch_geometric.nn as pyg

import stretto
from stretto import Graph
from stretto.compile import HOIST
from stretto.kernels import looks
from stretto.loader import arrays

N, EDGES = 40, 20_000


@pytest.fixture(autouse=True)
def _fresh():
    stretto.forget()
    yield
    stretto.forget()


ALIASES = {
    "numpy": lambda t: t.numpy().__imul__(2),
    "DLPack": lambda t: torch.from_dlpack(t).mul_(2),
    ".data": lambda t: t.data.mul_(2),
    "storage": lambda t: t.untyped_storage().copy_((t * 2).untyped_storage()),
}


def _inputs():
    return torch.rand(N, 6).double(), torch.randint(N // 2, (2, EDGES)), torch.rand(EDGES).double()


@pytest.mark.parametrize("way", ALIASES)
@pytest.mark.parametrize("name", ["x", "edge_index", "edge_weight"])
def test_an_alias_that_nobody_sees(way, name):
    stock = pyg.GCNConv(6, 3).double()
    fast = stretto.accelerate(pyg.GCNConv(6, 3).double())
    fast.load_state_dict(stock.state_dict())
    x, edge_index, edge_weight = _inputs()
    inputs = (x, edge_index) if name == "x" else (x, edge_index, edge_weight)
    for _ in range(3):
        before = fast(*inputs)
    ALIASES[way]({"x": x, "edge_index": edge_index, "edge_weight": edge_weight}[name])
    assert torch.equal(fast(*inputs), before), "it is seen: the documentation need not name it"
    stretto.forget()
    for _ in range(3):
        torch.testing.assert_close(fast(*inputs), stock(*inputs), rtol=1e-9, atol=1e-9)


def test_a_detached_alias_that_is_held_while_a_fused_optimizer_writes():
    parameter = torch.nn.Parameter(torch.rand(N, 6))
    held, (_, edge_index, _) = parameter.detach(), _inputs()
    conv = stretto.accelerate(pyg.LGConv())
    for _ in range(3):
        conv(held, edge_index)
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=1.0, fused=True).step()
    stretto.forget()
    torch.testing.assert_close(conv(held, edge_index), pyg.LGConv()(held, edge_index))


def test_nothing_is_left():
    x, edge_index, edge_weight = _inputs()
    held = Graph.of(edge_index, N)
    conv = stretto.accelerate(pyg.SSGConv(6, 3, alpha=0.1, K=2).double())
    for _ in range(3):
        conv(x, edge_index)
        conv(x, edge_index, edge_weight)
    conv(x.clone().requires_grad_(), edge_index)
    arrays._remembered(edge_index, N, N)
    x.requires_grad_()
    conv(x, edge_index)
    x.requires_grad_(False)
    assert looks.settled(x) is None
    assert held._derived
    assert HOIST.nbytes() == 0  # x is trained
    stretto.forget()
    assert looks.settled(x) is not None
    assert not held._derived
    assert not arrays._known
    assert Graph.cache_info().graphs == Graph.cache_info().tensors == 0
    assert Graph.of(edge_index, N) is not held
    torch.testing.assert_close(conv(x, edge_index), conv(x, edge_index))
