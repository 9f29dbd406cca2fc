"""Random calls of the native sampler, its engine and random_walk."""

from typing import Any

import torch
from torch import Tensor

from stretto.errors import StrettoError
from stretto.loader import random_walk
from stretto.loader.engine import Engine
from stretto.loader.native_sampler import NativeSampler, NodeType, Relation, Sampling, Slice, running_weights
from tests.loader.graphs import csc
from tests.loader.random_arguments import Calls, a_graph, right


def native(calls: Calls) -> None:
    """NativeSampler, its sample() and an Engine over it."""
    n, edge_index = a_graph(calls)
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
    _check_slot(slot, row, colptr, relation.edge_id, x, slices[0].scale, of_edges)
    engine = Engine(sampler, threads=calls.spoil("threads", 2), memory=calls.spoil("memory", 1 << 20))
    engine.submit(3, 0, 0, [seeds], [times])
    right(torch.equal(engine.next().n_id(), slot.n_id()), "the engine's batch is another")


def _check_slot(slot: Any, row: Tensor, colptr: Tensor, edge_id: Any, x: Tensor, scale: Any, of_edges: Tensor) -> None:
    n_id, e_id = slot.n_id(), slot.edge_id()
    wanted = x[n_id] if scale is None else x[n_id] * scale
    right(torch.equal(slot.slice(0), wanted), "rows of nodes")
    if e_id is None:
        return
    right(torch.equal(slot.slice(1), of_edges[e_id]), "rows of edges")
    source, target = n_id[slot.edge_index()]
    place = e_id if edge_id is None else _inverse(edge_id)[e_id]
    right(torch.equal(row[place].long(), source), "sources")
    right(bool((colptr[target] <= place).all()) and bool((place < colptr[target + 1]).all()), "targets")


def _inverse(order: Tensor) -> Tensor:
    if len(order.unique()) < len(order):  # ids that are not one each tell nothing of the place
        raise StrettoError("ids are not one each")
    return torch.empty_like(order, dtype=torch.int64).index_copy_(0, order.long(), torch.arange(len(order)))


def walks(calls: Calls) -> None:
    """random_walk."""
    n, edge_index = a_graph(calls)
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
    right(torch.equal(out[:, 0], start.long()), "starts")
    for a, b in zip(out[:, :-1].reshape(-1).tolist(), out[:, 1:].reshape(-1).tolist(), strict=True):
        neighbours = col[int(rowptr[a]) : int(rowptr[a + 1])].tolist()
        right(b in neighbours if neighbours else a == b, "a step is no edge")
