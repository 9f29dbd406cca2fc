"""From a Spec to its Case: tensors, our op, what others offer, the reference in fp64, the cost.

Function, reference and cost come from the op's declaration in stretto.ops.OPS. CASES says how to call it on a graph of
any size and whom to compare with; an op without a line there is compared with its reference on its first sample.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from benchmarks.suites import stock
from benchmarks.suites.case import OURS, Case, Spec
from benchmarks.suites.stock import Candidate
from stretto import datasets, ops
from stretto.errors import fail
from stretto.graph import Graph

RELATIONS = 16  # segments of segment_matmul

# Calls its first argument, one of the functions of an Op, on the inputs of the case.
Call = Callable[..., Tensor]


@lru_cache(maxsize=2)
def load(name: str) -> datasets.Dataset:
    """The graph of that name; the last two are kept."""
    return datasets.load_graph(name)


def build(spec: Spec) -> Case:
    """The case a Spec stands for."""
    if spec.op not in ops.OPS:
        fail(f"bench: '--op' is {spec.op!r}, wanted one of {', '.join(ops.OPS)}")
    torch.manual_seed(0)
    return CASES.get(spec.op, _sample)(spec, load(spec.graph))


def _case(
    spec: Spec,
    data: datasets.Dataset,
    inputs: tuple[Tensor, ...],
    call: Call,
    offers: stock.Offers,
    columns: str,
    gathered: tuple[int, Tensor] | None = None,
) -> Case:
    op = ops.OPS[spec.op]
    found, skipped = offers
    counted = spec.direction == "fwd"
    return Case(
        inputs=inputs,
        candidates=[Candidate(OURS, lambda *inputs: call(op.function, *inputs)), *found],
        reference=lambda *inputs: call(op.reference, *inputs),
        columns=columns,
        num_nodes=data.num_nodes,
        num_edges=data.num_edges,
        flops=float(call(op.flops, *inputs)) if counted else 0.0,
        bytes=float(call(op.bytes, *inputs)) if counted else 0.0,
        gathered=gathered,
        skipped=skipped,
    )


def _values(spec: Spec, *shape: int) -> Tensor:
    return torch.randn(*shape).to(spec.torch_dtype)


def _spmm(spec: Spec, data: datasets.Dataset) -> Case:
    graph = Graph.of(data.edge_index, data.num_nodes)
    x = _values(spec, data.num_nodes, spec.width)
    options: dict[str, Tensor] = {}
    weight = None
    if spec.weight == "edge":
        weight = options["weight"] = torch.rand(data.num_edges).to(spec.torch_dtype)
    elif spec.weight == "scales":
        wide = torch.promote_types(spec.torch_dtype, torch.float32)
        scale = graph.degree.clamp(min=1).to(torch.float64).rsqrt().to(wide)
        options["row_scale"] = options["col_scale"] = scale
        weight = scale[data.edge_index[1]] * scale[data.edge_index[0]]

    def call(function: Call, x: Tensor) -> Tensor:
        return function(graph, x, reduce=spec.reduce, **options)

    offers = stock.spmm(data.edge_index, x, weight, spec.reduce)
    return _case(spec, data, (x,), call, offers, "each", (data.num_nodes, graph.csr.columns()))


def _sddmm(spec: Spec, data: datasets.Dataset) -> Case:
    graph = Graph.of(data.edge_index, data.num_nodes)
    shape = (data.num_nodes, spec.heads, max(1, spec.width // spec.heads))
    a, b = _values(spec, *shape), _values(spec, *shape)
    offers = stock.sddmm(data.edge_index, a, b)
    gathered = (data.num_nodes, graph.csr.columns())
    return _case(spec, data, (a, b), lambda function, a, b: function(graph, a, b), offers, "sum", gathered)


def _edge_softmax(spec: Spec, data: datasets.Dataset) -> Case:
    graph = Graph.of(data.edge_index, data.num_nodes)
    score = _values(spec, data.num_edges, spec.heads)
    offers = stock.edge_softmax(data.edge_index, score, data.num_nodes)
    return _case(spec, data, (score,), lambda function, score: function(graph, score), offers, "each")


def _segment_reduce(spec: Spec, data: datasets.Dataset) -> Case:
    source = _values(spec, data.num_edges, spec.width)
    index = data.edge_index[1]

    def call(function: Call, source: Tensor) -> Tensor:
        return function(source, index, data.num_nodes, reduce=spec.reduce)

    offers = stock.segment_reduce(source, index, data.num_nodes, spec.reduce)
    return _case(spec, data, (source,), call, offers, "each")


def _gather_rows(spec: Spec, data: datasets.Dataset) -> Case:
    x = _values(spec, data.num_nodes, spec.width)
    index = data.edge_index[1]
    offers = stock.gather_rows(index)
    gathered = (data.num_nodes, index)
    return _case(spec, data, (x,), lambda function, x: function(x, index), offers, "each", gathered)


def _scatter_rows(spec: Spec, data: datasets.Dataset) -> Case:
    source = _values(spec, data.num_edges, spec.width)
    index = data.edge_index[1]
    offers = stock.scatter_rows(index, data.num_nodes)
    return _case(spec, data, (source,), lambda function, s: function(s, index, data.num_nodes), offers, "each")


def _segment_matmul(spec: Spec, data: datasets.Dataset) -> Case:
    x = _values(spec, data.num_nodes, spec.width)
    weight = _values(spec, RELATIONS, spec.width, spec.width) / spec.width**0.5
    cuts = torch.randint(data.num_nodes + 1, (RELATIONS - 1,)).sort().values
    ptr = torch.cat([torch.tensor([0]), cuts, torch.tensor([data.num_nodes])])
    offers = stock.segment_matmul(ptr)
    return _case(spec, data, (x, weight), lambda function, x, w: function(x, ptr, w), offers, "whole")


def _sample(spec: Spec, data: datasets.Dataset) -> Case:
    op = ops.OPS[spec.op]
    sample = next(op.samples(Graph.of(data.edge_index, data.num_nodes), spec.torch_dtype))
    where = [i for i, a in enumerate(sample.args) if isinstance(a, Tensor) and a.is_floating_point()]

    def call(function: Call, *inputs: Tensor) -> Tensor:
        replaced = dict(zip(where, inputs, strict=True))
        return function(*(replaced.get(i, a) for i, a in enumerate(sample.args)), **sample.kwargs)

    plain = Candidate("reference", lambda *inputs: call(op.reference, *inputs))
    return _case(spec, data, tuple(sample.args[i] for i in where), call, ([plain], {}), "whole")


CASES: dict[str, Callable[[Spec, datasets.Dataset], Case]] = {
    "spmm": _spmm,
    "sddmm": _sddmm,
    "edge_softmax": _edge_softmax,
    "segment_reduce": _segment_reduce,
    "gather_rows": _gather_rows,
    "scatter_rows": _scatter_rows,
    "segment_matmul": _segment_matmul,
}
