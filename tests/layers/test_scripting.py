"""torch.jit.script and torch.jit.trace make of an accelerated model what they make of a stock one."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import Linear, ReLU, Sequential

import stretto
from stretto.layers.layer import stock_of

N, EDGES, WIDTH = 20, 90, 6


class Copies(pyg.MessagePassing):
    """A layer of a user's own."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)


class Net(torch.nn.Module):
    """A user's model around a layer."""

    def __init__(self, conv: torch.nn.Module):
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index).relu()


LAYERS = {
    "GCN": lambda: pyg.GCNConv(WIDTH, 4),
    "SAGE": lambda: pyg.SAGEConv(WIDTH, 4),
    "SAGE max": lambda: pyg.SAGEConv(WIDTH, 4, aggr="max"),
    "GIN": lambda: pyg.GINConv(Sequential(Linear(WIDTH, 4), ReLU(), Linear(4, 4))),
    "GraphConv": lambda: pyg.GraphConv(WIDTH, 4),
    "TAG": lambda: pyg.TAGConv(WIDTH, 4),
    "SG": lambda: pyg.SGConv(WIDTH, 4, K=2),
    "SSG": lambda: pyg.SSGConv(WIDTH, 4, alpha=0.1, K=2),
    "Cheb": lambda: pyg.ChebConv(WIDTH, 4, K=3),
    "APPNP": lambda: pyg.APPNP(K=3, alpha=0.1),
    "ARMA": lambda: pyg.ARMAConv(WIDTH, 4),
    "Edge": lambda: pyg.EdgeConv(Sequential(Linear(2 * WIDTH, 4), ReLU())),
    "CG": lambda: pyg.CGConv(WIDTH),
    "GEN": lambda: pyg.GENConv(WIDTH, 4),
    "ResGated": lambda: pyg.ResGatedGraphConv(WIDTH, 4),
    "user's": Copies,
}


def _inputs():
    torch.manual_seed(0)
    return torch.randn(N, WIDTH), torch.randint(N, (2, EDGES))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of TorchScript
@pytest.mark.parametrize("name", LAYERS)
def test_what_scripts_as_stock_scripts_accelerated(name):
    x, edge_index = _inputs()
    model = Net(LAYERS[name]()).eval()
    wanted = torch.jit.script(copy.deepcopy(model))(x, edge_index)
    fast = stretto.accelerate(model)
    torch.testing.assert_close(torch.jit.script(fast)(x, edge_index), wanted)
    assert stock_of(type(fast.conv)) is not None  # torch has put nothing else into it
    torch.testing.assert_close(fast(x, edge_index), wanted)
    assert "fast" in str(stretto.report(fast))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", [*LAYERS, "GAT", "Transformer", "PNA"])
def test_a_trace_of_an_accelerated_model_is_stocks(name):
    x, edge_index = _inputs()
    more = {
        "GAT": lambda: pyg.GATConv(WIDTH, 4, heads=2),
        "Transformer": lambda: pyg.TransformerConv(WIDTH, 4, heads=2),
        "PNA": lambda: pyg.PNAConv(WIDTH, 4, ["mean", "max"], ["identity"], torch.tensor([0, 3, 9])),
    }
    model = Net({**LAYERS, **more}[name]()).eval()
    traced = torch.jit.trace(stretto.accelerate(copy.deepcopy(model)), (x, edge_index), check_trace=False)
    other, fewer = torch.randn(N, WIDTH), edge_index[:, ::2].contiguous()
    torch.testing.assert_close(traced(other, fewer), model(other, fewer))
