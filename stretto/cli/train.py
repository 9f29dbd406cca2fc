"""`stretto train`: train, validate and test a model on sampled batches, with checkpoints that continue bit for bit.

A checkpoint holds the model, the optimizer, the loader's clock, torch's random state and the history, behind a line
with their checksum; it is written beside its file and moved there, so that a crash leaves the old one whole. Resuming
gives the losses that a run without the interruption would have given.
"""

import hashlib
import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import torch.utils.deterministic
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch_geometric.nn.models import GAT, GCN, GIN, GraphSAGE

from stretto import files
from stretto.cli.convert import TRUST, read
from stretto.errors import expect, fail
from stretto.loader import NeighborLoader, Store, run_trimmed
from stretto.plug.accelerate import accelerate
from stretto.plug.inference import inference

MODELS = {"sage": GraphSAGE, "gcn": GCN, "gat": GAT, "gin": GIN}
MAGIC = b"stretto checkpoint 1 "  # and the SHA-256 of what comes after the line


@dataclass
class Run:
    """The settings of a run; what a checkpoint compares before it resumes."""

    graph: str
    model: str = "sage"
    fanout: tuple[int, ...] = (15, 10, 5)
    hidden: int = 256
    batch: int = 1024
    lr: float = 0.003
    dropout: float = 0.5
    seed: int = 0
    method: str = "uniform"


@dataclass
class Epoch:
    """What one epoch gave. waiting: the share of its time spent waiting for batches."""

    number: int
    loss: float
    seconds: float
    waiting: float
    val: float


@dataclass
class Outcome:
    """All epochs and the accuracy on the test nodes of the best one (by validation)."""

    epochs: list[Epoch] = field(default_factory=list)
    best_val: float = -1.0
    test: float = float("nan")


@contextmanager
def _repeatable() -> Iterator[None]:
    """Plans and kernels are not chosen by a clock, which would choose others in the process that resumes."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic  # a module that is an object
    filling = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False  # nobody reads what nobody has written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = filling


@_repeatable()
def train(
    run: Run,
    *,
    epochs: int,
    threads: int | None = None,
    checkpoint: Path | None = None,
    fast: bool = True,
    data: Any = None,
    trust_pickle: bool = False,
    tell: Callable[[Epoch], None] = lambda epoch: None,
    step: Callable[[int, int, float], None] = lambda done, total, waiting: None,
) -> Outcome:
    """Train up to `epochs` epochs, going on from the checkpoint if there is one.

    fast: with accelerate(). trust_pickle: a graph in a .pt file may call whatever it names (see SECURITY.md).
    """
    expect(run.model in MODELS, f"train: 'model' is {run.model!r}, wanted one of {', '.join(MODELS)}")
    if checkpoint is not None:
        try:
            files.expect_writable(checkpoint)
        except OSError as error:
            fail(f"train: the checkpoint {str(checkpoint)!r} cannot be written: {error}")
    saved = _read(checkpoint, run) if checkpoint is not None and checkpoint.exists() else None
    data = _split(read_any(run.graph, trust_pickle=trust_pickle) if data is None else data, run.seed)
    torch.manual_seed(run.seed)
    classes = int(data.y.max()) + 1
    model = MODELS[run.model](data.x.size(1), run.hidden, len(run.fanout), classes, dropout=run.dropout)
    model = accelerate(model) if fast else model
    optimizer = torch.optim.Adam(model.parameters(), lr=run.lr)
    options: dict[str, Any] = {} if threads is None else {"num_threads": threads}
    loader = NeighborLoader(
        data,
        list(run.fanout),
        input_nodes=data.train_mask,
        batch_size=run.batch,
        shuffle=True,
        method=run.method,
        **options,
    )
    outcome, first = Outcome(), 0
    if saved is not None and checkpoint is not None:
        outcome, first = _resume(checkpoint, saved, model, optimizer, loader)
    for number in range(first, epochs):
        epoch = _epoch(number, model, optimizer, loader, step)
        torch_state = torch.get_rng_state()  # sampling the validation nodes must not change the run
        prediction = inference(model, data).argmax(dim=-1)
        torch.set_rng_state(torch_state)
        epoch.val = _accuracy(prediction, data, data.val_mask)
        if epoch.val > outcome.best_val:
            outcome.best_val, outcome.test = epoch.val, _accuracy(prediction, data, data.test_mask)
        outcome.epochs.append(epoch)
        if checkpoint is not None:
            _save(checkpoint, run, model, optimizer, loader, outcome, number + 1)
        tell(epoch)
    loader.close()
    return outcome


def _epoch(
    number: int, model: torch.nn.Module, optimizer: Any, loader: NeighborLoader, step: Callable[..., None]
) -> Epoch:
    model.train()
    start = time.perf_counter()
    waited = total = 0.0
    seen, batches = 0, iter(loader)
    while True:
        asked = time.perf_counter()
        batch = next(batches, None)
        waited += time.perf_counter() - asked
        if batch is None:
            break
        optimizer.zero_grad()
        size = batch.batch_size
        loss = F.cross_entropy(run_trimmed(model, batch), batch.y[:size])
        loss.backward()
        optimizer.step()
        total, seen = total + float(loss.detach()) * size, seen + size
        step(seen, loader.input_data.node.numel(), waited / (time.perf_counter() - start))
    seconds = time.perf_counter() - start
    return Epoch(number, total / max(seen, 1), seconds, waited / seconds, 0.0)


def _accuracy(prediction: torch.Tensor, data: Any, mask: torch.Tensor) -> float:
    return float((prediction[mask] == data.y[mask]).double().mean()) if bool(mask.any()) else float("nan")


def read_any(source: str, *, trust_pickle: bool = False) -> Any:
    """A store's content, or whatever `stretto convert` reads."""
    if (Path(source) / "meta.json").is_file():
        return Store(source).load()
    return read(source, trust_pickle=trust_pickle)


def _split(data: Any, seed: int) -> Any:
    """Features, labels and masks are needed; nodes without a split are split 60/20/20 by the seed."""
    for name in ("x", "y"):
        expect(getattr(data, name, None) is not None, f"train: the graph has no {name!r}")
    data.x = data.x.float()
    masks = [getattr(data, f"{part}_mask", None) for part in ("train", "val", "test")]
    if any(mask is None for mask in masks):
        order = torch.rand(int(data.num_nodes or 0), generator=torch.Generator().manual_seed(seed))
        labelled = data.y >= 0
        data.train_mask, data.val_mask = labelled & (order < 0.6), labelled & (order >= 0.6) & (order < 0.8)
        data.test_mask = labelled & (order >= 0.8)
    expect(bool(data.train_mask.any()), "train: no node is in the training set")
    return data


def _save(path: Path, run: Run, model: Any, optimizer: Any, loader: Any, outcome: Outcome, epoch: int) -> None:
    state = {
        "run": asdict(run),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "loader": loader.state_dict(),
        "random": torch.get_rng_state(),
        "outcome": asdict(outcome),
        "epoch": epoch,
    }
    content = io.BytesIO()
    torch.save(state, content)
    with files.replacing(path) as out:
        out.write(MAGIC + hashlib.sha256(content.getbuffer()).hexdigest().encode() + b"\n")
        out.write(content.getbuffer())


def _read(path: Path, run: Run) -> dict[str, Any]:
    """What a checkpoint of such a run holds; one that is damaged, foreign or of another run is refused."""
    try:
        line, _, content = path.read_bytes().partition(b"\n")
    except OSError as error:
        fail(f"train: the checkpoint {str(path)!r} cannot be read: {error}")
    if not line.startswith(MAGIC):
        fail(f"train: {str(path)!r} is no checkpoint of stretto train; give it another name")
    if line.removeprefix(MAGIC) != hashlib.sha256(content).hexdigest().encode():
        fail(f"train: the checkpoint {str(path)!r} is damaged: its content has another checksum")
    state: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
    if state["run"] != asdict(run):
        differs = [k for k, v in asdict(run).items() if state["run"].get(k) != v]
        fail(f"train: checkpoint {path} was made with other settings ({', '.join(differs)}); give it another name")
    return state


def _resume(path: Path, state: dict[str, Any], model: Any, optimizer: Any, loader: Any) -> tuple[Outcome, int]:
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:  # the same settings, but the graph has other features or classes now
        fail(f"train: checkpoint {path} does not fit the graph: {' '.join(str(error).split())}")
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    loader.load_state_dict(state["loader"])
    saved = state["outcome"]
    epochs = [Epoch(**e) for e in saved["epochs"]]
    return Outcome(epochs, saved["best_val"], saved["test"]), state["epoch"]


def command(
    graph: Annotated[
        str, typer.Option(help="A graph with features and labels: a name, .npz, .pt, OGB folder or store.")
    ] = "cora",
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "sage",
    fanout: Annotated[str, typer.Option(help="Neighbours per layer; -1: all.")] = "15,10,5",
    hidden: Annotated[int, typer.Option(help="Width of the hidden layers.")] = 256,
    epochs: Annotated[int, typer.Option(help="Epochs in all, those of the checkpoint included.")] = 10,
    batch: Annotated[int, typer.Option(help="Training nodes of a batch.")] = 1024,
    lr: Annotated[float, typer.Option(help="Learning rate of Adam.")] = 0.003,
    dropout: Annotated[float, typer.Option(help="Dropout between the layers.")] = 0.5,
    method: Annotated[str, typer.Option(help="Sampling: uniform or labor.")] = "uniform",
    threads: Annotated[int, typer.Option(help="Threads that prepare batches; 0: half the cores.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 0,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Continue from this file, and write it after every epoch.")
    ] = None,
    stock: Annotated[bool, typer.Option(help="Leave the model's layers as PyG has them.")] = False,
    trust_pickle: Annotated[bool, typer.Option(help=TRUST)] = False,
) -> None:
    """Train on sampled batches, validate every epoch, test the best one."""
    out = Console()
    hops = tuple(int(k) for k in fanout.split(","))
    run = Run(graph, model, hops, hidden, batch, lr, dropout, seed, method)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[waiting]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("training", waiting="")

        def step(done: int, total: int, waiting: float) -> None:
            bar.update(task, completed=done, total=total, waiting=f"{waiting:.0%} waiting for batches")

        def tell(e: Epoch) -> None:
            took = f"{e.seconds:.2f} s, {e.waiting:.0%} waiting for batches"
            out.print(f"epoch {e.number:3d}  loss {e.loss:.4f}  val {e.val:.4f}  {took}")

        outcome = train(
            run,
            epochs=epochs,
            threads=threads or None,
            checkpoint=checkpoint,
            fast=not stock,
            trust_pickle=trust_pickle,
            tell=tell,
            step=step,
        )
    out.print(f"best val {outcome.best_val:.4f}, test {outcome.test:.4f}")
