"""Random calls of the loader's, the stores' and the samplers' entries, with right and wrong arguments mixed.

    python -m tests.loader.random_calls SEED COUNT [FIRST]

Every call is a function of (SEED, its number) alone, and is printed before it is made: the last line before a crash is
the call that crashed, and FIRST repeats from there. A call may be refused by StrettoError, or by code of PyG or torch
that was reached first; what is not refused must be right: its rows are the rows of the table, its edges edges of the
graph. test_random_calls.py runs it in a process of its own.
"""

import json
import random
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from stretto.errors import StrettoError
from stretto.loader import ClusterLoader, LinkNeighborLoader, NeighborLoader, Store, random_walk
from stretto.loader.engine import Engine
from stretto.loader.native_sampler import NativeSampler, NodeType, Relation, Sampling, Slice, running_weights
from tests.loader.graphs import csc

NUMBERS = (-1, 0, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**60, 2**63 - 1, 2**63, 1.5, "2", None, True)


class Calls:
    """One call's random choices. `risk`: how often an argument is spoilt."""

    def __init__(self, seed: int, number: int) -> None:
        self.choose = random.Random(f"{seed}/{number}")
        self.torch = torch.Generator().manual_seed(self.choose.randrange(2**31))
        self.risk = self.choose.choice((0.0, 0.03, 0.1))
        self.said: list[str] = []

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, max(high, 1), shape, generator=self.torch)

    def spoil(self, name: str, value: Any) -> Any:
        """The value, or now and then something like it."""
        if self.choose.random() >= self.risk:
            return value
        ways = NUMBER if isinstance(value, (int, float)) else TENSOR
        way = self.choose.choice(sorted(ways))
        self.said.append(f"{name}: {way}")
        return ways[way](self, value)


def _gone(calls: Calls, x: Tensor) -> Tensor:
    x = x.clone()
    x.untyped_storage().resize_(x.untyped_storage().nbytes() // 2)
    return x


def _set(value: int) -> Any:
    def change(calls: Calls, x: Tensor) -> Tensor:
        out = x.clone()
        if out.numel():
            out.view(-1)[calls.choose.randrange(out.numel())] = value
        return out

    return change


NUMBER = {"another": lambda calls, value: calls.choose.choice(NUMBERS)}
TENSOR = {
    "shorter": lambda calls, x: x[: len(x) // 2],
    "longer": lambda calls, x: torch.cat([x, x]),
    "every second, of twice": lambda calls, x: torch.cat([x, x])[::2],
    "strided": lambda calls, x: x.repeat_interleave(2, dim=-1)[..., ::2],  # the same values
    "transposed": lambda calls, x: x.t().contiguous().t() if x.dim() == 2 else x,  # the same values
    "more columns": lambda calls, x: x.unsqueeze(-1).expand(*x.shape, 2),
    "expanded": lambda calls, x: x[:1].expand(x.shape) if len(x) else x,
    "scalar": lambda calls, x: torch.tensor(3),
    "float": lambda calls, x: x.float(),
    "double": lambda calls, x: x.double(),
    "int8": lambda calls, x: x.to(torch.int8),
    "int16": lambda calls, x: x.to(torch.int16),
    "int32": lambda calls, x: x.to(torch.int32),
    "bool": lambda calls, x: x.bool(),
    "complex": lambda calls, x: x.to(torch.complex64),
    "conjugate": lambda calls, x: x.to(torch.complex64).conj(),
    "meta": lambda calls, x: x.to("meta"),
    "sparse": lambda calls, x: x.to_sparse(),
    "gone": _gone,
    "-1": _set(-1),
    "100": _set(100),
    "large": _set(2**31 - 1),
    "none": lambda calls, x: None,
    "list": lambda calls, x: x.tolist(),
    "reversed": lambda calls, x: x.flip(0),
}


def _graph(calls: Calls) -> tuple[int, Tensor]:
    n = calls.choose.choice((1, 5, 40, 300))
    return n, calls.integers(n, 2, calls.choose.choice((0, 7, 200, 3000)))


def _right(condition: Any, what: str) -> None:
    if not bool(condition):
        raise AssertionError(f"not refused, and wrong: {what}")


# ---- the entries ----


def native(calls: Calls) -> None:
    """NativeSampler, its sample() and an Engine over it."""
    n, edge_index = _graph(calls)
    colptr, row, order = csc(edge_index, n)
    count, flags = row.numel(), Sampling(calls.choose.randrange(512))
    hops = calls.choose.randrange(3)
    x, scale = torch.rand(n, 5, generator=calls.torch), None
    if calls.choose.random() < 0.3:
        x, scale = calls.integers(100, n, 5).to(torch.int8), torch.rand(5, generator=calls.torch)
    of_edges = torch.rand(count, 3, generator=calls.torch)
    time = calls.integers(50, count) if calls.choose.random() < 0.3 else None
    weight = torch.rand(count, generator=calls.torch) if calls.choose.random() < 0.3 else None
    if Sampling.CSR in flags and calls.choose.random() > calls.risk:
        flags &= ~Sampling.LAYERED
    if calls.choose.random() > calls.risk:
        flags |= Sampling.DISJOINT if time is not None else flags
    colptr, row = calls.spoil("colptr", colptr), calls.spoil("row", row)
    running = None if weight is None else running_weights(colptr, calls.spoil("weight", weight))
    x, of_edges = calls.spoil("x", x), calls.spoil("of_edges", of_edges)
    relation = Relation(
        colptr, row, [calls.spoil("fanout", calls.choose.choice((-1, 0, 2, 20))) for _ in range(hops)],
        calls.spoil("source", 0), calls.spoil("target", 0), calls.spoil("edge_id", order),
        None if time is None else calls.spoil("time", time),
        None if running is None else calls.spoil("running", running),
    )  # fmt: skip
    slices = [Slice(x, calls.spoil("type", 0), scale=None if scale is None else calls.spoil("scale", scale))]
    slices.append(Slice(of_edges, of_edges=True))
    at = calls.integers(50, n) if time is not None or calls.choose.random() < calls.risk else None
    node_type = NodeType(calls.spoil("num_nodes", n), at if at is None else calls.spoil("node time", at))
    sampler = NativeSampler([node_type], [relation], calls.spoil("hops", hops), flags, slices)
    seeds = calls.spoil("seeds", calls.integers(n, calls.choose.choice((0, 1, 9))))
    times = calls.spoil("times", calls.integers(50, len(seeds))) if calls.choose.random() < 0.2 else None
    slot = sampler.sample(3, 0, 0, [seeds], [times])
    _check_slot(slot, row, colptr, relation.edge_id, x, scale, of_edges)
    engine = Engine(sampler, threads=calls.spoil("threads", 2), memory=calls.spoil("memory", 1 << 20))
    engine.submit(3, 0, 0, [seeds], [times])
    _right(torch.equal(engine.next().n_id(), slot.n_id()), "the engine's batch is another")


def _check_slot(slot: Any, row: Tensor, colptr: Tensor, edge_id: Any, x: Tensor, scale: Any, of_edges: Tensor) -> None:
    n_id, e_id = slot.n_id(), slot.edge_id()
    wanted = x[n_id] if scale is None else x[n_id] * scale
    _right(torch.equal(slot.slice(0), wanted), "rows of nodes")
    if e_id is None:
        return
    _right(torch.equal(slot.slice(1), of_edges[e_id]), "rows of edges")
    source, target = n_id[slot.edge_index()]
    place = e_id if edge_id is None else _inverse(edge_id)[e_id]
    _right(torch.equal(row[place].long(), source), "sources")
    _right(bool((colptr[target] <= place).all()) and bool((place < colptr[target + 1]).all()), "targets")


def _inverse(order: Tensor) -> Tensor:
    if len(order.unique()) < len(order):  # ids that are not one each tell nothing of the place
        raise StrettoError("ids are not one each")
    return torch.empty_like(order, dtype=torch.int64).index_copy_(0, order.long(), torch.arange(len(order)))


def _options(calls: Calls) -> dict[str, Any]:
    options: dict[str, Any] = {
        "batch_size": calls.choose.choice((1, 7, 64)),
        "num_threads": calls.spoil("num_threads", 2),
        "memory": calls.spoil("memory", 1 << 20),
        "replace": calls.choose.random() < 0.3,
        "disjoint": calls.choose.random() < 0.3,
        "subgraph_type": calls.choose.choice(("directional", "induced", "bidirectional")),
    }
    if calls.choose.random() < 0.3 and not options["replace"]:
        options["method"] = "labor"
    if calls.choose.random() < 0.3 and options["subgraph_type"] == "directional":
        options["semantics"] = "layered"
    return options


def _fanouts(calls: Calls) -> list[Any]:
    return [
        calls.spoil("num_neighbors", calls.choose.choice((-1, 0, 3, 10))) for _ in range(calls.choose.randrange(1, 3))
    ]


def loader(calls: Calls) -> None:
    """NeighborLoader or LinkNeighborLoader over a Data, some of it changed before and after."""
    n, edge_index = _graph(calls)
    given = Data(x=torch.rand(n, 4, generator=calls.torch), edge_index=calls.spoil("edge_index", edge_index))
    count = edge_index.size(1)
    given.edge_attr = calls.spoil("edge_attr", torch.rand(count, 3, generator=calls.torch))
    given.y = calls.spoil("y", calls.integers(9, n))
    options = _options(calls)
    if calls.choose.random() < 0.3:
        options["time_attr"] = "when"
        given.when = calls.spoil("when", calls.integers(60, n))
        options["temporal_strategy"] = calls.choose.choice(("uniform", "last"))
    if calls.choose.random() < 0.3:
        options["weight_attr"] = "w"
        given.w = calls.spoil("w", torch.rand(count, generator=calls.torch))
    if calls.choose.random() < 0.5:
        options["input_nodes"] = calls.spoil("input_nodes", calls.integers(n, 30))
        made: Any = NeighborLoader(given, _fanouts(calls), **options)
    else:
        options["edge_label_index"] = calls.spoil("edge_label_index", calls.integers(n, 2, 30))
        made = LinkNeighborLoader(given, _fanouts(calls), **options)
    edges = given.edge_index
    for _ in range(2):
        for name in ("x", "y", "edge_attr"):
            given[name] = calls.spoil(f"then {name}", given[name])
        for i, batch in enumerate(made):
            _check_batch(batch, given, edges)
            if i == 3:
                break


def _same_edges(got: Tensor, wanted: Tensor) -> bool:
    """In a bidirectional batch an edge has the same number both ways."""
    return bool(((got == wanted).all(0) | (got == wanted.flip(0)).all(0)).all())


def _check_batch(batch: Any, given: Any, edges: Tensor) -> None:
    _right(_same_edges(batch.n_id[batch.edge_index], edges[:, batch.e_id].long()), "edges")
    for name in list(given.to_dict()):
        value = given[name]
        if not isinstance(value, Tensor) or value.is_meta or value.is_sparse or value.dim() == 0:
            continue
        if given.is_node_attr(name):
            _right(torch.equal(batch[name], value[batch.n_id]), name)
        elif name != "edge_index" and given.is_edge_attr(name):
            _right(torch.equal(batch[name], value[batch.e_id]), name)


def hetero(calls: Calls) -> None:
    """NeighborLoader over a HeteroData."""
    sizes = {"a": calls.choose.choice((1, 30)), "b": calls.choose.choice((2, 50))}
    given = HeteroData()
    for kind, n in sizes.items():
        given[kind].x = calls.spoil(f"x of {kind}", torch.rand(n, 3, generator=calls.torch))
    for source, target in (("a", "b"), ("b", "a"), ("b", "b")):
        ends = torch.stack([calls.integers(sizes[source], 60), calls.integers(sizes[target], 60)])
        given[source, "to", target].edge_index = calls.spoil("edge_index", ends)
        given[source, "to", target].w = calls.spoil("w", torch.rand(60, generator=calls.torch))
        given[source, "to", target].when = calls.spoil("when", calls.integers(9, 60))
    options = _options(calls)
    if calls.choose.random() < 0.3:
        options["time_attr"], options["input_time"] = "when", calls.spoil("input_time", calls.integers(9, sizes["b"]))
    if calls.choose.random() < 0.3:
        options["weight_attr"] = "w"
    made = NeighborLoader(given, _fanouts(calls), input_nodes=("b", None), **options)
    kind = calls.choose.choice(("a", "b"))
    given[kind].x = calls.spoil("then x", given[kind].x)
    for batch in made:
        for kind in sizes:
            if isinstance(given[kind].x, Tensor) and given[kind].is_node_attr("x") and not given[kind].x.is_meta:
                _right(torch.equal(_dense(batch[kind].x), _dense(given[kind].x)[batch[kind].n_id]), f"x of {kind}")
        for edge_type in given.edge_types if options["subgraph_type"] != "bidirectional" else ():
            ends = batch[edge_type].edge_index
            local = torch.stack([batch[edge_type[0]].n_id[ends[0]], batch[edge_type[2]].n_id[ends[1]]])
            _right(torch.equal(local, given[edge_type].edge_index[:, batch[edge_type].e_id].long()), str(edge_type))


def _dense(x: Tensor) -> Tensor:
    return x.to_dense() if x.is_sparse else x


def sparse(calls: Calls) -> None:
    """NeighborLoader over a torch.sparse adj_t."""
    n, edge_index = _graph(calls)
    colptr, row, _ = csc(edge_index, n, torch.int64)
    layout = calls.choose.choice(("coo", "csr", "csc"))
    ones = torch.ones(row.numel())
    if layout == "coo":
        adj = torch.sparse_coo_tensor(calls.spoil("indices", edge_index.flip(0)), ones, (n, n), check_invariants=False)
    else:
        make = torch.sparse_csr_tensor if layout == "csr" else torch.sparse_csc_tensor
        adj = make(calls.spoil("pointers", colptr), calls.spoil("indices", row), ones, (n, n), check_invariants=False)
    made = NeighborLoader(Data(x=torch.arange(n), adj_t=adj, num_nodes=n), _fanouts(calls), batch_size=16)
    for batch in made:
        _right(torch.equal(batch.x, batch.n_id), "x")


def store(calls: Calls) -> None:
    """A Store, damaged in its files or in meta.json, or given other features."""
    n, edge_index = _graph(calls)
    given = Data(x=torch.rand(n, 4, generator=calls.torch), edge_index=edge_index, num_nodes=n)
    given.w = torch.rand(edge_index.size(1), generator=calls.torch)
    given.when = calls.integers(9, n)
    with tempfile.TemporaryDirectory() as folder:
        made = Store.create(Path(folder) / "s", given, features=calls.choose.choice(("as is", "fp16", "int8")))
        x = made.load().x
        if calls.choose.random() < 0.5:
            _damage(calls, made.folder)
            made = Store(made.folder, verify=False)
            x = None
        elif calls.choose.random() < 0.5:
            x = calls.spoil("features", calls.spoil("features", x))
            made = made.with_features(x)
        options: dict[str, Any] = {"batch_size": 16, "num_threads": 1}
        if calls.choose.random() < 0.3 and "when" in made.data:
            options["time_attr"] = "when"
        if calls.choose.random() < 0.3 and "w" in made.data:
            options["weight_attr"] = "w"
        for batch in NeighborLoader(made, _fanouts(calls), **options):
            if x is not None:
                _right(torch.equal(batch.x.float(), x[batch.n_id].float()), "x")
        made.load()


def _damage(calls: Calls, folder: Path) -> None:
    choose = calls.choose
    files = sorted(folder.glob("*.bin"))
    for _ in range(choose.randrange(1, 4)):
        kind, file = choose.choice(("flip", "cut", "grow", "field", "swap", "rows")), choose.choice(files)
        calls.said.append(f"{kind} {file.name}")
        content = bytearray(file.read_bytes())
        if kind == "flip" and content:
            content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
        elif kind == "cut":
            content = content[: choose.randrange(len(content) + 1)]
        elif kind == "grow":
            content += bytes(choose.randrange(9000))
        elif kind == "swap":
            shutil.copy(choose.choice(files), file)
            continue
        elif kind == "field":
            _edit_field(calls, folder / "meta.json")
            continue
        elif kind == "rows":
            meta = json.loads((folder / "meta.json").read_text())
            for entry in meta["arrays"]:
                if entry["file"] == file.name and entry["shape"][0]:
                    size, rows = entry["bytes"] // entry["shape"][0], choose.choice((0, 1, 3, 50, 4000))
                    entry["shape"][0], entry["bytes"] = rows, rows * size
                    content = (content + bytes(rows * size))[: rows * size]
            (folder / "meta.json").write_text(json.dumps(meta))
        file.write_bytes(bytes(content))


def _edit_field(calls: Calls, path: Path) -> None:
    """Another value in some place of meta.json."""
    meta = json.loads(path.read_text())
    held: Any = meta
    while True:
        key = calls.choose.choice(sorted(held) if isinstance(held, dict) else range(len(held)))
        if not isinstance(held[key], (dict, list)) or not held[key] or calls.choose.random() < 0.1:
            break
        held = held[key]
    values = (
        -1,
        0,
        3,
        2**62,
        2**70,
        1.5,
        None,
        True,
        "",
        "x",
        "../x",
        "/etc/passwd",
        "int64",
        "int8",
        [],
        {},
        [1],
        ["a"],
    )
    held[key] = calls.choose.choice(values)
    calls.said.append(f"{key} = {held[key]!r}")
    path.write_text(json.dumps(meta))


def walks(calls: Calls) -> None:
    """random_walk."""
    n, edge_index = _graph(calls)
    order = torch.argsort(edge_index[0] * n + edge_index[1])
    rowptr = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(edge_index[0], minlength=n).cumsum(0)])
    rowptr, col = calls.spoil("rowptr", rowptr), calls.spoil("col", edge_index[1][order])
    start = calls.spoil("start", calls.integers(n, 20))
    weights = (1.0, 1.0, 0.5, 2.0, 1e-300, 1e300, 5e-324, float("inf"), float("nan"), 0, -1)
    p, q = calls.choose.choice(weights), calls.choose.choice(weights)
    calls.said.append(f"p {p} q {q}")
    length = calls.choose.choice((0, 1, 5))
    if calls.choose.random() < calls.risk:
        length = calls.choose.choice((-1, 1.5, "2", None))
    out = random_walk(rowptr, col, start, length, p, q)
    _right(torch.equal(out[:, 0], start.long()), "starts")
    for a, b in zip(out[:, :-1].reshape(-1).tolist(), out[:, 1:].reshape(-1).tolist(), strict=True):
        neighbours = col[int(rowptr[a]) : int(rowptr[a + 1])].tolist()
        _right(b in neighbours if neighbours else a == b, "a step is no edge")


def clusters(calls: Calls) -> None:
    """ClusterLoader over parts that somebody changed."""
    n, edge_index = _graph(calls)
    colptr, row, order = csc(edge_index, n, torch.int64)

    class Parts:
        pass

    partition, parts = Parts(), Parts()
    half = n // 2
    named = {"indptr": colptr, "index": row, "partptr": torch.tensor([0, half, n])}
    for name, value in named.items():
        setattr(partition, name, calls.spoil(name, value))
    partition.sparse_format = "csc"  # type: ignore[attr-defined]
    given = Data(x=torch.arange(n), edge_index=edge_index[:, order], num_nodes=n)
    given.edge_attr = calls.spoil("edge_attr", torch.arange(order.numel()))
    parts.partition, parts.data = partition, given  # type: ignore[attr-defined]
    parts.__class__.__len__ = lambda self: 2  # type: ignore[method-assign]
    made = ClusterLoader(parts, batch_size=1, num_threads=calls.spoil("num_threads", 1))
    given.x = calls.spoil("then x", given.x)
    for batch in made:
        if isinstance(given.x, Tensor) and given.is_node_attr("x") and given.x.dtype == torch.int64:
            _right(batch.x.numel() in (half, n - half), "x")


ENTRIES = (native, native, loader, loader, hetero, sparse, store, walks, clusters)


def refused(error: BaseException) -> bool:
    """Whether it was refused as it should be: by us in words, or by PyG or torch before it came to us."""
    if isinstance(error, StrettoError):
        return True
    if isinstance(error, (AssertionError, MemoryError)):
        return "torch_geometric" in traceback.extract_tb(error.__traceback__)[-1].filename
    ours = [f.filename for f in traceback.extract_tb(error.__traceback__)]
    innermost = next(
        (f for f in reversed(ours) if "/stretto/" in f or "torch_geometric" in f or "random_calls" in f), ""
    )
    return "/stretto/" not in innermost


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main(seed: int, count: int, first: int = 0) -> int:
    wrong = 0
    for number in range(first, first + count):
        calls = Calls(seed, number)
        entry = calls.choose.choice(ENTRIES)
        _say(f"{seed} {number} {entry.__name__} ")
        try:
            torch.manual_seed(number)
            entry(calls)
            outcome = "done"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}".splitlines()[0]
            if not refused(error):
                wrong += 1
                traceback.print_exc(file=sys.stdout)
                outcome = f"WRONG {outcome}"
        _say(f"{'; '.join(calls.said)} -> {outcome}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*(int(argument) for argument in sys.argv[1:])))
