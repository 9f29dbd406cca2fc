"""Random calls of the loaders, over data that is changed before and after they are made."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from stretto.loader import ClusterLoader, LinkNeighborLoader, NeighborLoader
from tests.loader.graphs import csc
from tests.loader.random_arguments import Calls, a_graph, fan_outs, right


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


def loader(calls: Calls) -> None:
    """NeighborLoader or LinkNeighborLoader over a Data, some of it changed before and after."""
    n, edge_index = a_graph(calls)
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
        made: Any = NeighborLoader(given, fan_outs(calls), **options)
    else:
        options["edge_label_index"] = calls.spoil("edge_label_index", calls.integers(n, 2, 30))
        made = LinkNeighborLoader(given, fan_outs(calls), **options)
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
    right(_same_edges(batch.n_id[batch.edge_index], edges[:, batch.e_id].long()), "edges")
    for name in list(given.to_dict()):
        value = given[name]
        if not isinstance(value, Tensor) or value.is_meta or value.is_sparse or value.dim() == 0:
            continue
        if given.is_node_attr(name):
            right(torch.equal(batch[name], value[batch.n_id]), name)
        elif name != "edge_index" and given.is_edge_attr(name):
            right(torch.equal(batch[name], value[batch.e_id]), name)


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
    made = NeighborLoader(given, fan_outs(calls), input_nodes=("b", None), **options)
    kind = calls.choose.choice(("a", "b"))
    given[kind].x = calls.spoil("then x", given[kind].x)
    for batch in made:
        for kind in sizes:
            if isinstance(given[kind].x, Tensor) and given[kind].is_node_attr("x") and not given[kind].x.is_meta:
                right(torch.equal(_dense(batch[kind].x), _dense(given[kind].x)[batch[kind].n_id]), f"x of {kind}")
        for edge_type in given.edge_types if options["subgraph_type"] != "bidirectional" else ():
            ends = batch[edge_type].edge_index
            local = torch.stack([batch[edge_type[0]].n_id[ends[0]], batch[edge_type[2]].n_id[ends[1]]])
            right(torch.equal(local, given[edge_type].edge_index[:, batch[edge_type].e_id].long()), str(edge_type))


def _dense(x: Tensor) -> Tensor:
    return x.to_dense() if x.is_sparse else x


def sparse(calls: Calls) -> None:
    """NeighborLoader over a torch.sparse adj_t."""
    n, edge_index = a_graph(calls)
    colptr, row, _ = csc(edge_index, n, torch.int64)
    layout = calls.choose.choice(("coo", "csr", "csc"))
    ones = torch.ones(row.numel())
    if layout == "coo":
        adj = torch.sparse_coo_tensor(calls.spoil("indices", edge_index.flip(0)), ones, (n, n), check_invariants=False)
    else:
        make = torch.sparse_csr_tensor if layout == "csr" else torch.sparse_csc_tensor
        adj = make(calls.spoil("pointers", colptr), calls.spoil("indices", row), ones, (n, n), check_invariants=False)
    made = NeighborLoader(Data(x=torch.arange(n), adj_t=adj, num_nodes=n), fan_outs(calls), batch_size=16)
    for batch in made:
        right(torch.equal(batch.x, batch.n_id), "x")


def clusters(calls: Calls) -> None:
    """ClusterLoader over parts that somebody changed."""
    n, edge_index = a_graph(calls)
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
            right(batch.x.size(0) in (half, n - half), "x")
