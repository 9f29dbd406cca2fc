"""`stretto demo`: stock PyG and the same code with two lines added, side by side.

First a two-layer GCN on the embedded Cora, trained to accuracy: both start from the same weights and draw the same
dropout masks, so they must agree. Then training steps on a power-law graph of the size of ogbn-arxiv, where the time
goes into the graph: times, memory, speed-up and difference of the loss, and what report() says of the model. Last,
sampled mini-batches of the same graph: one pass of our loader beside PyG's.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

import torch
import torch_geometric.loader
import torch_geometric.typing
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.nn.models import GAT, GCN, GraphSAGE

import stretto
from stretto import datasets
from stretto.errors import expect
from stretto.machine import facts
from stretto.machine.timing import Timing, as_alone, measure, ratio, settle
from stretto.observe.agreement import relative_error
from stretto.observe.peak_memory import peak_bytes
from stretto.page.terminal import console, progress

OURS, STOCK = "stretto", "stock PyG"
HIDDEN, DROPOUT, RATE, DECAY = 16, 0.5, 0.01, 5e-4  # on Cora
FANOUT, BATCH, BATCHES = [15, 10, 5], 1024, 24  # fewer would show how long the first ones take
LARGE, (FEATURES, WIDE, CLASSES) = "rmat:17:1200000", (128, 256, 40)
LARGE_MODELS: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: GCN(FEATURES, WIDE, 2, CLASSES),
    "sage": lambda: GraphSAGE(FEATURES, WIDE, 2, CLASSES),
    "gat": lambda: GAT(FEATURES, WIDE, 2, CLASSES, heads=4),
}
SAMPLE = 0.2  # seconds: shorter steps are timed several in a row, as in training
TOLERANCE = 1e-3  # of loss and gradients, relative to stock's


class Run:
    """A model in training, its optimiser, and the time its steps took."""

    timing: Timing

    def __init__(self, model: nn.Module, data: Any, train: Tensor | slice, *, seed: int = 0, **options: Any) -> None:
        self.model, self.data, self.train, self.seed = model, data, train, seed
        self.x = data.x.clone()  # ours are moved into large pages (memory/pages.py), stock's are not
        self.optimiser = torch.optim.Adam(model.parameters(), **options)
        self.last_loss = torch.zeros(())

    def loss(self) -> Tensor:
        """Cross-entropy of the training nodes. The seed makes the dropout masks of both models the same."""
        torch.manual_seed(self.seed)
        scores = self.model(self.x, self.data.edge_index)
        return F.cross_entropy(scores[self.train], self.data.y[self.train])

    def step(self) -> None:
        """Forward, loss, backward, Adam."""
        self.model.train()
        self.optimiser.zero_grad()
        loss = self.loss()
        loss.backward()
        self.optimiser.step()
        self.seed += 1
        self.last_loss = loss.detach()

    def loss_and_gradients(self) -> list[Tensor]:
        """Both as they are before the next step."""
        loss = self.loss()
        return [loss.detach(), *torch.autograd.grad(loss, list(self.model.parameters()))]

    @torch.no_grad()
    def accuracy(self) -> float:
        """Share of the test nodes classified rightly."""
        test = self.data.test_mask
        guess = self.model.eval()(self.x, self.data.edge_index).argmax(-1)
        return float((guess[test] == self.data.y[test]).float().mean())


def both(model: nn.Module, *task: Any, **options: Any) -> dict[str, Run]:
    """The model as it is, and a copy of it with two lines added."""
    faster = stretto.accelerate(copy.deepcopy(model))
    return {STOCK: Run(model, *task, **options), OURS: Run(faster, *task, **options)}


def race(runs: dict[str, Run], after: Callable[[str], None], **options: Any) -> None:
    """Time steps of the models in turns."""
    steps = {name: as_alone(run.step, ours=name != STOCK) for name, run in runs.items()}
    for name, timing in measure(steps, after=after, **options).items():
        runs[name].timing = timing


def train(epochs: int, seed: int, after: Callable[[str], None]) -> dict[str, Run]:
    """Train both models on Cora in turns, one epoch of each at a time."""
    cora = datasets.load_graph("cora")
    assert cora.x is not None
    x = cora.x / cora.x.sum(-1, keepdim=True).clamp(min=1.0)
    data = Data(x, cora.edge_index, y=cora.y, test_mask=cora.masks["test"])
    torch.manual_seed(seed)
    model = GCN(x.size(1), HIDDEN, 2, cora.num_classes, dropout=DROPOUT)
    runs = both(model, data, cora.masks["train"], seed=seed * epochs, lr=RATE, weight_decay=DECAY)
    race(runs, after, repeats=epochs, warmup=0)
    return runs


def _cora(out: Console, epochs: int, seed: int) -> None:
    with progress(2 * epochs, "two GCNs on Cora") as step:
        runs = train(epochs, seed, step)
    title = f"GCN to accuracy on Cora (2,708 nodes, 10,556 edges), {epochs} epochs"
    table = _table(title, "model", "test accuracy", "last loss", "training s", "epoch ms (median)", "speed-up")
    for name, run in runs.items():
        times = f"{ratio(runs[STOCK].timing, run.timing)[0]:.1f}x"
        seconds, loss = sum(run.timing.samples), float(run.last_loss)
        table.add_row(name, f"{run.accuracy():.1%}", f"{loss:.5f}", f"{seconds:.2f}", _milliseconds(run.timing), times)
    out.print(table)
    out.print(str(stretto.report(runs[OURS].model)), highlight=False, soft_wrap=True)
    out.print()


def _large_data(graph: str) -> Any:
    """The graph with random features and labels."""
    known = datasets.load_graph(graph)
    torch.manual_seed(0)
    x, y = torch.randn(known.num_nodes, FEATURES), torch.randint(CLASSES, (known.num_nodes,))
    return Data(x, known.edge_index, y=y, num_nodes=known.num_nodes)


def _large(out: Console, graph: str, data: Any, repeats: int) -> None:
    """Training steps of three models on the graph."""
    table = _table(
        f"training steps on {graph}, {FEATURES}-{WIDE}-{CLASSES}", "model", "stock ms", "stretto ms", "speed-up",
        "stock peak MiB", "stretto peak MiB", "difference",
    )  # fmt: skip
    for name, make in LARGE_MODELS.items():
        torch.manual_seed(0)
        runs = both(make(), data, slice(None), lr=1e-4)
        stock, ours = runs.values()
        pairs = zip(ours.loss_and_gradients(), stock.loss_and_gradients(), strict=True)
        difference = max(relative_error(mine, theirs.double()) for mine, theirs in pairs)
        expect(difference <= TOLERANCE, f"demo: loss or gradients of {name} differ from stock's by {difference:.1e}")
        peaks = [f"{peak_bytes(run.step) / 2**20:.0f}" for run in (stock, ours)]
        settle(ours.step, minimum=12)
        with progress(2 * (repeats + 1), f"{name} on {graph}") as step:
            race(runs, step, repeats=repeats, sample_seconds=SAMPLE)
        times = f"{ratio(stock.timing, ours.timing)[0]:.1f}x"
        table.add_row(name, _milliseconds(stock.timing), _milliseconds(ours.timing), times, *peaks, f"{difference:.1e}")
    out.print(table)
    out.print("difference: largest relative difference of loss and gradients. One step is forward, backward and Adam.")


def _loaders(data: Any, nodes: Tensor) -> Iterator[tuple[str, Any]]:
    """Ours, then PyG's with each number of workers, over its own sampler where it has one."""
    common: dict[str, Any] = {"input_nodes": nodes, "batch_size": BATCH, "shuffle": True}
    yield OURS, stretto.NeighborLoader(data, FANOUT, num_threads=2, **common)
    has_sampler = torch_geometric.typing.WITH_PYG_LIB or torch_geometric.typing.WITH_TORCH_SPARSE
    who = "PyG" if has_sampler else "PyG over our sampler"
    for workers in (0, 1, 2):
        sampler: Any = None if has_sampler else stretto.NeighborSampler(data, FANOUT)
        options = {**common, "neighbor_sampler": sampler, "num_workers": workers, "persistent_workers": workers > 0}
        yield f"{who}, {workers} workers", torch_geometric.loader.NeighborLoader(data, FANOUT, **options)


def _sampled(out: Console, graph: str, data: Any, repeats: int) -> None:
    """A pass over some batches, sampled and sliced, by our loader and by PyG's."""
    nodes = torch.randint(data.num_nodes, (BATCH * BATCHES,), generator=torch.Generator().manual_seed(0))
    loaders = dict(_loaders(data, nodes))
    batch = next(iter(loaders[OURS]))
    expect(torch.equal(batch.x, data.x[batch.n_id]), "demo: a row of a batch is not the right one")
    passes: dict[str, Callable[[], object]] = {name: partial(deque, loader, 0) for name, loader in loaders.items()}
    timings = measure(passes, repeats=max(repeats, 5))
    columns = ("loader", "ms a batch", "speed-up of stretto")
    table = _table(f"mini-batches of {graph}, fan-out {FANOUT}, {BATCH} seeds", *columns)
    for name, timing in timings.items():
        each = Timing(tuple(seconds / BATCHES for seconds in timing.samples))
        table.add_row(name, _milliseconds(each), f"{ratio(timing, timings[OURS])[0]:.1f}x")
    out.print(table)
    out.print(
        "stretto train --graph G --fanout 15,10,5 trains on such batches: checkpoints, resumes, shows its waiting."
    )


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(first, title=escape(title), title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _milliseconds(timing: Timing) -> str:
    """The median, with the digits that mean something."""
    value = timing.median * 1e3
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}"


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
        data = _large_data(graph)
        _large(out, graph, data, repeats)
        _sampled(out, graph, data, repeats)
    out.print(facts.headline(), style="dim")
