"""`stretto demo`: the same two-layer GCN on Cora, once as stock PyG and once on our ops, trained side by side.

Both start from the same weights and draw the same dropout masks, so they must reach the same accuracy; their steps take
turns, so that the times can be compared on a busy machine.
"""

import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GCNConv

from stretto import datasets
from stretto.bench import report
from stretto.graph import Graph
from stretto.ops import spmm
from stretto.tune.timing import Timing, ratio

HIDDEN, DROPOUT, RATE, DECAY = 16, 0.5, 0.01, 5e-4


class StockGcn(nn.Module):
    """Two GCNConv, as PyG's own example writes them."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first = GCNConv(features, HIDDEN, cached=True)  # type: ignore[abstract]
        self.second = GCNConv(HIDDEN, classes, cached=True)  # type: ignore[abstract]

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """x [N, F] -> class scores [N, C]."""
        x = F.dropout(x, DROPOUT, self.training)
        x = self.first(x, edge_index).relu()
        x = F.dropout(x, DROPOUT, self.training)
        return self.second(x, edge_index)


class OpsGcn(nn.Module):
    """The same model on stretto.ops: D^-1/2 (A + I) D^-1/2 X W + b, the scales fused into the aggregation."""

    def __init__(self, stock: StockGcn) -> None:
        super().__init__()
        given = stock.state_dict()
        self.weights = nn.ParameterList(given[f"{conv}.lin.weight"].clone() for conv in ("first", "second"))
        self.biases = nn.ParameterList(given[f"{conv}.bias"].clone() for conv in ("first", "second"))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """x [N, F] -> class scores [N, C]."""
        graph = Graph.of(edge_index, x.shape[0]).with_self_loops
        scale = graph.degree_power(-0.5, x.dtype)
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = F.dropout(x.relu() if layer else x, DROPOUT, self.training)
            x = spmm(graph, x @ weight.T, row_scale=scale, col_scale=scale) + bias
        return x


class Run:
    """One model, its optimiser, and the time its steps took."""

    def __init__(self, model: nn.Module, data: datasets.Dataset, x: Tensor) -> None:
        self.model, self.data, self.x = model, data, x
        self.optimiser = torch.optim.Adam(model.parameters(), lr=RATE, weight_decay=DECAY)
        self.seconds: list[float] = []

    def step(self, epoch: int) -> None:
        """One epoch. The seed makes the dropout masks of all models the same."""
        torch.manual_seed(epoch)
        train, labels = self.data.masks["train"], self.data.y
        assert labels is not None
        start = time.perf_counter()
        self.model.train()
        self.optimiser.zero_grad()
        F.cross_entropy(self.model(self.x, self.data.edge_index)[train], labels[train]).backward()
        self.optimiser.step()
        self.seconds.append(time.perf_counter() - start)

    @torch.no_grad()
    def accuracy(self) -> float:
        """Share of the test nodes classified rightly."""
        test, labels = self.data.masks["test"], self.data.y
        assert labels is not None
        guess = self.model.eval()(self.x, self.data.edge_index).argmax(-1)
        return float((guess[test] == labels[test]).float().mean())


def train(epochs: int, seed: int, after: Callable[[str], None]) -> dict[str, Run]:
    """Train both models in turns, one epoch of each at a time."""
    data = datasets.load_graph("cora")
    assert data.x is not None
    x = data.x / data.x.sum(-1, keepdim=True).clamp(min=1.0)
    torch.manual_seed(seed)
    stock = StockGcn(x.shape[1], data.num_classes)
    runs = {"stock PyG": Run(stock, data, x), "stretto": Run(OpsGcn(stock), data, x)}
    for epoch in range(epochs):
        for run in runs.values():
            run.step(seed * epochs + epoch)
        after("training")
    return runs


def command(
    epochs: Annotated[int, typer.Option(help="Epochs to train.", min=1)] = 200,
    seed: Annotated[int, typer.Option(help="Seed of weights and dropout.")] = 0,
) -> None:
    """Train a two-layer GCN on the embedded Cora with stock PyG and with stretto, side by side."""
    with report.progress(epochs, "two GCNs on Cora") as step:
        runs = train(epochs, seed, step)
    table = Table(title=f"two-layer GCN, Cora (2,708 nodes, 10,556 edges), {epochs} epochs", title_justify="left")
    table.add_column("model")
    for column in ("test accuracy", "training s", "epoch ms (median)"):
        table.add_column(column, justify="right")
    timings = {name: Timing(tuple(run.seconds)) for name, run in runs.items()}
    for name, run in runs.items():
        median = f"{timings[name].median * 1e3:.2f}"
        table.add_row(name, f"{run.accuracy():.1%}", f"{sum(run.seconds):.2f}", median)
    out = report.console()
    out.print(table)
    times, low, high = ratio(timings["stock PyG"], timings["stretto"])
    out.print(f"stretto is {times:.2f}x ({low:.2f}-{high:.2f}) as fast per epoch. {report.headline()}", soft_wrap=True)
