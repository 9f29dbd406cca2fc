"""`stretto demo`: stock PyG and the same code with two lines added, side by side.

First a two-layer GCN on the embedded Cora, trained to accuracy: both start from the same weights and draw the same
dropout masks, so they must agree. Then training steps on a power-law graph of the size of ogbn-arxiv, where the time
goes into the graph: times, memory, speed-up and difference of the loss, and what report() says of the model. Last,
sampled mini-batches of the same graph: one pass of our loader beside PyG's.
"""

import copy
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GCNConv

import stretto
from benchmarks.suites import loader, models, report
from benchmarks.suites.loader_setting import OURS, Setting, make_data
from stretto import datasets
from stretto.machine.timing import Timing, ratio
from stretto.page.terminal import console

HIDDEN, DROPOUT, RATE, DECAY = 16, 0.5, 0.01, 5e-4
FANOUT, BATCH, BATCHES = [15, 10, 5], 1024, 24  # fewer would show how long the first ones take
LARGE, WIDTHS = "rmat:17:1200000", [128, 256, 40]


class Gcn(nn.Module):
    """Two GCNConv with dropout between them.

    None on the input, where drawing 2,708 x 1,433 random bits is 20 times the work of both layers, in either model.
    """

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first = GCNConv(features, HIDDEN)  # type: ignore[abstract]
        self.second = GCNConv(HIDDEN, classes)  # type: ignore[abstract]

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """x [N, F] -> class scores [N, C]."""
        x = self.first(x, edge_index).relu()
        x = F.dropout(x, DROPOUT, self.training)
        return self.second(x, edge_index)


class Run:
    """One model, its optimiser, and the time its steps took."""

    def __init__(self, model: nn.Module, data: datasets.Dataset, x: Tensor) -> None:
        self.model, self.data, self.x = model, data, x
        self.optimiser = torch.optim.Adam(model.parameters(), lr=RATE, weight_decay=DECAY)
        self.seconds: list[float] = []
        self.loss = 0.0

    def step(self, epoch: int) -> None:
        """One epoch. The seed makes the dropout masks of both models the same."""
        torch.manual_seed(epoch)
        train, labels = self.data.masks["train"], self.data.y
        assert labels is not None
        start = time.perf_counter()
        self.model.train()
        self.optimiser.zero_grad()
        loss = F.cross_entropy(self.model(self.x, self.data.edge_index)[train], labels[train])
        loss.backward()
        self.optimiser.step()
        self.seconds.append(time.perf_counter() - start)
        self.loss = loss.item()

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
    model = Gcn(x.shape[1], data.num_classes)
    faster = stretto.accelerate(copy.deepcopy(model))
    runs = {"stock PyG": Run(model, data, x), "stretto": Run(faster, data, x)}
    for epoch in range(epochs):
        for run in runs.values():
            run.step(seed * epochs + epoch)
        after("training")
    return runs


def _cora(out: Console, epochs: int, seed: int) -> None:
    with report.progress(epochs, "two GCNs on Cora") as step:
        runs = train(epochs, seed, step)
    table = Table(title=f"GCN to accuracy on Cora (2,708 nodes, 10,556 edges), {epochs} epochs", title_justify="left")
    table.add_column("model")
    for column in ("test accuracy", "last loss", "training s", "epoch ms (median)", "speed-up"):
        table.add_column(column, justify="right")
    timings = {name: Timing(tuple(run.seconds)) for name, run in runs.items()}
    for name, run in runs.items():
        times = ratio(timings["stock PyG"], timings[name])[0]
        median = f"{timings[name].median * 1e3:.2f}"
        table.add_row(
            name, f"{run.accuracy():.1%}", f"{run.loss:.5f}", f"{sum(run.seconds):.2f}", median, f"{times:.1f}x"
        )
    out.print(table)
    out.print(str(stretto.report(runs["stretto"].model)), highlight=False, soft_wrap=True)
    out.print()


def _large(out: Console, graph: str, repeats: int) -> None:
    table = Table(title=escape(f"training steps on {graph}, {'-'.join(map(str, WIDTHS))}"), title_justify="left")
    table.add_column("model")
    for column in ("stock ms", "stretto ms", "speed-up", "stock peak MiB", "stretto peak MiB", "difference"):
        table.add_column(column, justify="right")
    for name in ("gcn", "sage", "gat"):
        with report.progress(2 * (repeats + 2), f"{name} on {graph}") as step:
            result = models.run(
                name, graph, WIDTHS, repeats=repeats, only=("stock edge_index", models.OURS), lead_in=False, after=step
            )
        stock, ours = result.get("stock edge_index"), result.get(models.OURS)
        if stock is None or ours is None or stock.timing is None or ours.timing is None:
            reasons = "; ".join(o.reason for o in result.outcomes if o.reason)
            table.add_row(name, escape(reasons))
            continue
        times = ratio(stock.timing, ours.timing)[0]
        peaks = [f"{o.peak_bytes / 2**20:.0f}" if o.peak_bytes is not None else "" for o in (stock, ours)]
        columns = (report.milliseconds(stock.timing), report.milliseconds(ours.timing), f"{times:.1f}x", *peaks)
        table.add_row(name, *columns, f"{ours.error:.1e}")
    out.print(table)
    out.print("difference: largest relative difference of loss and gradients. One step is forward, backward and Adam.")


def _sampled(out: Console, graph: str, repeats: int) -> None:
    """A pass over some batches, sampled and sliced, by our loader and by PyG's."""
    setting = Setting(make_data(graph, WIDTHS[0]), FANOUT, BATCH, BATCHES, 2, max(repeats, 5), graph)
    rows = [row for row in loader.whole(setting) if row.timing is not None]
    table = Table(title=f"mini-batches of {graph}, fan-out {FANOUT}, {BATCH} seeds", title_justify="left")
    for column in ("loader", "ms a batch", "speed-up of stretto"):
        table.add_column(column, justify="left" if column == "loader" else "right")
    ours = next(row.timing for row in rows if row.candidate == OURS)
    for row in rows:
        assert row.timing is not None
        assert ours is not None
        table.add_row(row.candidate, report.milliseconds(row.timing), f"{ratio(row.timing, ours)[0]:.1f}x")
    out.print(table)
    out.print(
        "stretto train --graph G --fanout 15,10,5 trains on such batches: checkpoints, resumes, shows its waiting."
    )


def command(
    epochs: Annotated[int, typer.Option(help="Epochs on Cora.", min=1)] = 200,
    seed: Annotated[int, typer.Option(help="Seed of weights and dropout.")] = 0,
    large: Annotated[bool, typer.Option(help="Also the power-law graph of arXiv size (a minute or two).")] = True,
    graph: Annotated[str, typer.Option(help="That graph.")] = LARGE,
    repeats: Annotated[int, typer.Option(help="Timed steps on the large graph.", min=1)] = 3,
) -> None:
    """Stock PyG and the same code with two lines added: Cora to accuracy, a graph of arXiv size, mini-batches."""
    out = console()
    _cora(out, epochs, seed)
    if large:
        _large(out, graph, repeats)
        _sampled(out, graph, repeats)
    out.print(report.headline(), style="dim")
