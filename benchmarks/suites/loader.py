"""`stretto bench loader`: sampling, slicing and whole batches, ours beside PyG with pyg-lib or torch-sparse.

Each measure is checked first (every sampled edge exists, every row is the right one), then its candidates are timed in
turns. A candidate that cannot run says why.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch_geometric.loader as pyg
import torch_geometric.typing
import typer
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from torch_geometric.data import Data

from benchmarks.suites import loader_models, report, results
from benchmarks.suites.ceilings import LINE
from benchmarks.suites.loader_setting import OURS, Row, Setting, make_data, per_batch, published, to_row
from benchmarks.suites.stock import optional
from stretto.errors import expect
from stretto.kernels import cpu
from stretto.loader import NeighborLoader, NeighborSampler
from stretto.loader.native_sampler import NativeSampler, NodeType, Sampling, Slice
from stretto.machine import facts
from stretto.machine.timing import Timing, measure
from stretto.memory import pages
from stretto.page.terminal import console


def _sample_all(native: NativeSampler, seeds: list[Tensor], times: Tensor | None = None) -> int:
    edges = 0
    for number, batch in enumerate(seeds):
        slot = native.sample(0, 0, number, [batch], [None if times is None else times[batch]])
        slot.edge_index(), slot.n_id(), slot.edge_id()  # as tensors, which the others make too
        edges += slot.num_edges()
        del slot  # nobody holds a batch while the next is made
    return edges


def sampling(
    setting: Setting, name: str, *, weighted: bool = False, temporal: bool = False, e_id: bool = False, **options: Any
) -> list[Row]:
    """Sampling alone on one thread, in sampled edges per second; e_id: everybody hands out edge ids, or nobody."""
    data = setting.data
    options = {
        **options,
        **({"weight_attr": "weight"} if weighted else {}),
        **({"time_attr": "time"} if temporal else {}),
    }
    sampler = NeighborSampler(data, setting.fanout, **options)
    native, seeds = sampler.native(Sampling.EDGE_ID if e_id else Sampling(0)), setting.seeds
    times = data.time if temporal else None
    checked = sampler.native(Sampling.EDGE_ID).sample(0, 0, 0, [seeds[0]], [None if times is None else times[seeds[0]]])
    ends, ids = checked.n_id()[checked.edge_index()], checked.edge_id()
    expect(
        ids is not None and torch.equal(ends, data.edge_index[:, ids]), f"{name}: a sampled edge is not in the graph"
    )
    candidates: dict[str, Callable[[], object]] = {OURS: lambda: _sample_all(native, seeds, times)}
    edges = {OURS: _sample_all(native, seeds, times)}
    missing = []
    for library, loaded in (("pyg-lib", optional("pyg_lib")), ("torch-sparse", optional("torch_sparse"))):
        if isinstance(loaded, str):
            missing.append(Row(name, f"PyG + {library}", None, reason=loaded))
            missing += published(name, setting) if library == "pyg-lib" else []
            continue
        if library == "torch-sparse" and (weighted or temporal or options or not e_id):
            missing.append(Row(name, f"PyG + {library}", None, reason="no such sampling, or always with edge ids"))
            continue
        stock = _stock_sampling(library, sampler, seeds, setting.fanout, weighted, temporal, data, e_id)
        edges[f"PyG + {library}"] = stock()
        candidates[f"PyG + {library}"] = stock
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        timings = measure(candidates, repeats=setting.repeats, lead_in=True)
    finally:
        torch.set_num_threads(before)
    rows = [
        Row(name, who, per_batch(t, setting.batches), edges[who] / setting.batches, "edges")
        for who, t in timings.items()
    ]
    return rows + missing


def _stock_sampling(
    library: str,
    sampler: NeighborSampler,
    seeds: list[Tensor],
    fanout: list[int],
    weighted: bool,
    temporal: bool,
    data: Data,
    e_id: bool,
) -> Callable[[], int]:
    arrays = sampler.graph.edges[None]
    colptr, row = arrays.colptr, arrays.row.long()
    order = slice(None) if arrays.edge_id is None else arrays.edge_id.long()
    weight = data.weight[order] if weighted else None
    node_time = data.time if temporal else None

    def pyg_lib() -> int:
        total = 0
        for batch in seeds:
            seed_time = None if node_time is None else node_time[batch]
            out = torch.ops.pyg.neighbor_sample(
                colptr,
                row,
                batch,
                fanout,
                node_time,
                None,
                seed_time,
                weight,
                True,
                False,
                True,
                temporal,
                "uniform",
                e_id,
            )
            total += out[0].numel()
            del out
        return total

    def torch_sparse() -> int:
        return sum(
            torch.ops.torch_sparse.neighbor_sample(colptr, row, b, fanout, False, True)[1].numel() for b in seeds
        )

    return pyg_lib if library == "pyg-lib" else torch_sparse


def gather(setting: Setting) -> list[Row]:
    """Slicing of features alone on one thread: as many random rows as a batch has nodes."""
    name, x = "gather", setting.data.x
    assert isinstance(x, Tensor)
    n = x.size(0)
    generator = torch.Generator().manual_seed(1)
    # Other rows every time, as batches bring them: the same ones would be read from the cache.
    batches = [torch.randint(0, n, (min(47_000, n),), generator=generator) for _ in range(24)]
    native = NativeSampler([NodeType(n)], [], 0, Sampling(0), [Slice(x)])
    bare = NativeSampler([NodeType(n)], [], 0, Sampling(0))
    slot = native.sample(0, 0, 0, [batches[0]], [None])
    expect(torch.equal(slot.slice(0), x[batches[0]]), "gather: a row is not the right one")
    del slot
    plain = x.clone()  # the loader's features are moved into large pages (memory/pages.py), stock's are not
    out = torch.empty(batches[0].numel(), x.size(1), dtype=x.dtype)
    turn = itertools.cycle(batches)
    # The ceilings: as many cache lines in the same order, added up, nothing stored; and as much stored, nothing read.
    lines = torch.ones(n, -(-x.size(1) * x.element_size() // LINE) * LINE // 4)
    pages.enlarge(lines.data_ptr(), lines.nbytes)
    narrow = itertools.cycle([b.to(torch.int32) for b in batches])
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        timings = measure(
            {
                OURS: lambda: native.sample(0, 0, 0, [next(turn)], [None]),
                "bare": lambda: bare.sample(0, 0, 0, [next(turn)], [None]),
                "indexing": lambda: plain[next(turn)],
                "index_select(out=)": lambda: torch.index_select(plain, 0, next(turn), out=out),
                "reading alone": lambda: cpu.gather_ceiling(lines, next(narrow), 8),
                "writing alone": out.zero_,
            },
            repeats=max(setting.repeats, 45),  # a call is short, and the memory of a shared machine uneven
            warmup=2,
        )
    finally:
        torch.set_num_threads(before)
    # A slot is made of seeds, whose entry into the table of ids is no part of slicing: its time is taken off.
    without = timings.pop("bare").median
    timings[OURS] = Timing(tuple(max(s - without, 1e-9) for s in timings[OURS].samples))
    size = float(out.numel() * out.element_size())
    return [Row(name, who, t, size, "bytes") for who, t in timings.items()]


def whole(setting: Setting) -> list[Row]:
    """Whole batches (sampled, sliced, assembled), ours beside the best of PyG's numbers of workers."""
    name, data = f"whole loader, {setting.threads} threads", setting.data
    nodes = torch.cat(setting.seeds)
    common: dict[str, Any] = {"input_nodes": nodes, "batch_size": setting.batch, "shuffle": True}
    loaders: dict[str, Any] = {OURS: NeighborLoader(data, setting.fanout, num_threads=setting.threads, **common)}
    have = torch_geometric.typing.WITH_PYG_LIB or torch_geometric.typing.WITH_TORCH_SPARSE
    for workers in (0, 1, 2):
        kwargs = {**common, "num_workers": workers, "persistent_workers": workers > 0}
        if have:
            loaders[f"PyG, {workers} workers"] = pyg.NeighborLoader(data, setting.fanout, **kwargs)
        sampler: Any = NeighborSampler(data, setting.fanout)
        loaders[f"PyG over our sampler, {workers} workers"] = pyg.NeighborLoader(
            data, setting.fanout, neighbor_sampler=sampler, **kwargs
        )
    batch = next(iter(loaders[OURS]))
    expect(torch.equal(batch.x, data.x[batch.n_id]), "whole loader: a row is not the right one")
    timings = measure({who: partial(_drain, it) for who, it in loaders.items()}, repeats=setting.repeats)
    rows = [
        Row(name, who, per_batch(t, setting.batches), float(batch.num_edges), "edges") for who, t in timings.items()
    ]
    if not have:
        rows.append(Row(name, "PyG", None, reason="needs pyg-lib or torch-sparse to start"))
        rows += published(name, setting)
    return rows


def labor(setting: Setting) -> list[Row]:
    """Nodes per batch of LABOR at the same fan-out."""
    rows = []
    variants: tuple[tuple[str, dict[str, Any]], ...]
    variants = (("uniform", {}), ("labor", {}), ("labor, layer_dependency", {"layer_dependency": True}))
    for method, options in variants:
        native = NeighborSampler(setting.data, setting.fanout, method=method.split(",")[0], **options).native(
            Sampling(0)
        )
        nodes = sum(native.sample(0, 0, i, [s], [None]).num_nodes() for i, s in enumerate(setting.seeds))
        timing = measure({OURS: partial(_sample_all, native, setting.seeds)}, repeats=3)[OURS]
        rows.append(
            Row("nodes per batch", method, per_batch(timing, setting.batches), nodes / setting.batches, "nodes")
        )
    return rows


def _drain(loader: Any) -> None:
    for _ in loader:
        pass


# name -> rows of that measure
MEASURES: dict[str, Callable[[Setting], list[Row]]] = {
    "sampling": lambda s: sampling(s, f"sampling {s.fanout}, batch {s.batch}"),
    "ids": lambda s: sampling(s, f"sampling {s.fanout}, batch {s.batch}, with edge ids", e_id=True),
    "small": lambda s: sampling(replace(s, batch=64, batches=100), f"sampling {s.fanout}, batch 64"),
    "small-ids": lambda s: sampling(
        replace(s, batch=64, batches=100), f"sampling {s.fanout}, batch 64, with edge ids", e_id=True
    ),
    "wide": lambda s: sampling(replace(s, fanout=[20, 20, 20]), "sampling [20, 20, 20]"),
    "layered": lambda s: sampling(s, "sampling, layered", semantics="layered"),
    "weighted": lambda s: sampling(s, "sampling, weighted", weighted=True),
    "temporal": lambda s: sampling(s, "sampling, temporal", temporal=True),
    "gather": gather,
    "whole": whole,
    "labor": labor,
    "epoch": loader_models.epoch,
    "inference": loader_models.inference,
    "first": loader_models.first_batch,
}


def command(
    graph: Annotated[str, typer.Option(help="Graph by name, as for `bench ops`.")] = "rmat:19:7000000",
    fanout: Annotated[str, typer.Option(help="Neighbours per hop.")] = "15,10,5",
    batch: Annotated[int, typer.Option(help="Seeds of a batch.")] = 1024,
    batches: Annotated[int, typer.Option(help="Batches of one sample.")] = 12,
    features: Annotated[int, typer.Option(help="Columns of x.")] = 100,
    threads: Annotated[int, typer.Option(help="Threads of the whole loader.")] = 2,
    repeats: Annotated[int, typer.Option(help="Samples of each candidate.")] = 5,
    only: Annotated[str, typer.Option(help=f"Of these, separated by commas: {', '.join(MEASURES)}.")] = "",
    csv: Annotated[Path | None, typer.Option(help="Put a row of each measure into this file.")] = None,
) -> None:
    """Time sampling, slicing and whole batches against what PyG has here."""
    chosen = only.split(",") if only else list(MEASURES)
    for name in chosen:
        expect(name in MEASURES, f"bench loader: '--only' names {name!r}, wanted {', '.join(MEASURES)}")
    out = console()
    out.print(facts.headline())
    fanouts = [int(k) for k in fanout.split(",")]
    setting = Setting(make_data(graph, features), fanouts, batch, batches, threads, repeats, graph)
    again = f"stretto bench loader --graph {graph} --fanout {fanout} --batch {batch} --batches {batches}"
    for name in chosen:  # shown and written as they come: a run that is cut off has lost nothing
        fresh = MEASURES[name](setting)
        out.print(_table(graph, fresh))
        groups = [list(lines) for _, lines in itertools.groupby(fresh, key=lambda row: row.measure)]
        command = f"{again} --threads {threads} --repeats {repeats} --only {name}"
        results.save(csv, [to_row(lines, setting, command) for lines in groups])


def _table(graph: str, rows: list[Row]) -> Table:
    table = Table(title=escape(f"loader on {graph}"))
    for column in ("measure", "candidate", "ms/batch", "spread", "rate", "ours is"):
        table.add_column(column, justify="right" if column in ("ms/batch", "rate", "ours is") else "left")
    for _, group in itertools.groupby(rows, key=lambda row: row.measure):
        lines = list(group)
        ours = next((r for r in lines if r.candidate == OURS and r.timing is not None), None)
        for row in lines:
            table.add_row(row.measure, row.candidate, *_cells(row, ours))
    return table


def _cells(row: Row, ours: Row | None) -> Iterator[str]:
    if row.timing is None:
        yield from ("-", row.reason, "-", "-")
        return
    yield report.milliseconds(row.timing)
    yield report.spread(row.timing)
    if row.unit in ("nodes", "bytes held"):
        yield f"{row.work / 1e6:.3g} M {row.unit}"
    else:
        yield f"{row.work / row.timing.median / 1e6:.4g} M {row.unit}/s" if row.work else ""
    if ours is None or ours.timing is None or row is ours or row.published:
        yield ""
    elif row.unit == "bytes held":
        yield f"{row.work / ours.work:.2f}x" if ours.work else ""
    else:
        yield f"{row.timing.median / ours.timing.median:.2f}x"
