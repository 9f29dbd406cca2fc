"""Edge messages in the forms layers have them: terms side by side in one array, the layer's own node added, one row of
edge features for both directions. Fewer and larger products before, fewer calls after: on mini-batches of small graphs
that is most of a layer's time. Devices without such kernels get the same from edge_messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.graph import Graph
from stretto.kernels import Csr, backend, cpu_edge, on_host, reference_edge
from stretto.kernels.cpu_dense import product_in_blocks
from stretto.memory import pool
from stretto.ops import library
from stretto.ops.dense import dense
from stretto.ops.edge_messages import edge_messages
from stretto.ops.kernel import differentiable, through
from stretto.ops.rows import gather_rows


def _native(graph: Graph, *tensors: Tensor | None) -> bool:
    """Whether the kernel's own forms may run: not on other devices, and not where torch.compile must see the op."""
    result = [t for t in tensors if t is not None]
    plain = (
        not any(library.traced(t) or t.device != graph.device for t in result) and len({t.dtype for t in result}) == 1
    )
    return plain and backend(graph.device).native


# ---- row, row2, col, col2 side by side ----


def gated_messages(graph: Graph, nodes: Tensor, edge: Tensor | None = None, *, act: str, act2: str) -> Tensor:
    """Sum of act(r_i + c_j + e) * act2(r2_i + c2_j + e2). nodes [n, 4 k]: r, r2, c, c2; edge [E, 2 k]: e, e2 -> [n, k].

    The graph is square: every node is at both ends of edges.
    """
    n, width = nodes.shape
    fit = n == graph.num_rows == graph.num_cols and not width % 4
    fit = fit and (edge is None or edge.shape == (graph.num_edges, width // 2))
    if not fit or not _native(graph, nodes, edge):
        return edge_messages(graph, *_apart(nodes, edge), act=act, act2=act2)
    out: Tensor = _gated((graph, (act, act2)), nodes, edge)
    return out


def _apart(nodes: Tensor, edge: Tensor | None) -> tuple[Tensor | None, ...]:
    row, row2, col, col2 = nodes.chunk(4, dim=1)
    first, second = (None, None) if edge is None else edge.chunk(2, dim=1)
    return row, col, first, row2, col2, second


def _run_gated(plan: Any, nodes: Tensor, edge: Tensor | None) -> Tensor:
    graph, acts = plan
    return cpu_edge.edge_messages(graph.edge_csr, _apart(nodes, edge), acts)


def _plain_gated(plan: Any, nodes: Tensor, edge: Tensor | None) -> Tensor:
    graph, acts = plan
    return reference_edge.edge_messages(graph.edge_csr, _apart(nodes, edge), acts)


def _gated_gradients(plan: Any, saved: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool]) -> tuple[Any, Any]:
    (graph, acts), (nodes, edge) = plan, saved
    dnodes = pool.empty(nodes.shape, nodes.dtype)
    dedge = None if edge is None else pool.empty(edge.shape, edge.dtype)
    csrs, into = (graph.edge_csr, graph.T.edge_csr), _apart(dnodes, dedge)
    cpu_edge.edge_messages_grad(*csrs, _apart(nodes, edge), acts, grads[0], (True,) * 6, into=into)
    return dnodes, dedge


_gated = differentiable("Gated", _run_gated, _gated_gradients, again=through(_plain_gated))


# ---- one row of edge features for both directions ----


class Pairs:
    """Edges that come in both directions: the pair of every edge, and the nodes at the two ends of every pair.

    number [E]: the pair of each edge, in the user's order; ends [2, P]: source and destination of one edge of each
    pair. A self-loop is a pair of its own.
    """

    def __init__(self, graph: Graph, number: Tensor, ends: Tensor, *, symmetric: bool = False) -> None:
        """symmetric: whether graph and transpose have their entries in the same places."""
        self.number, self.ends = number, ends.contiguous()
        self.csr = _renumbered(graph.edge_csr, number)
        self.csr_t = self.csr if symmetric else _renumbered(graph.T.edge_csr, number)


def _renumbered(csr: Csr, number: Tensor) -> Csr:
    ids = number if csr.edge_id is None else number.index_select(0, csr.edge_id)
    ids = ids.to(torch.int64 if csr.col is None else csr.col.dtype)
    sizes = (csr.num_rows, csr.num_cols, csr.num_edges)
    return Csr(csr.rowptr, csr.col, ids, *sizes, csr.tasks, csr.hubs, csr.num_slots)


def product_messages(graph: Graph, x: Tensor, factor: Tensor, pairs: Pairs | None = None) -> Tensor:
    """Sum of x_j * factor. x [n, k], factor [E, k], or [P, k] where edges share it -> [n, k]."""
    return _with_features(graph, ("identity", "identity"), None, x, None, factor, pairs)


def rooted_messages(
    graph: Graph, x: Tensor, edge: Tensor, scale: float, pairs: Pairs | None = None, *, act: str
) -> Tensor:
    """Sum of act(x_j + e), plus scale * x_i. x [n, k], edge [E, k], or [P, k] where edges share it -> [n, k]."""
    return _with_features(graph, (act, "one"), scale, x, edge, None, pairs)


def _with_features(
    graph: Graph,
    acts: tuple[str, str],
    scale: float | None,
    x: Tensor,
    edge: Tensor | None,
    factor: Tensor | None,
    pairs: Pairs | None,
) -> Tensor:
    features, count = edge if factor is None else factor, graph.num_edges if pairs is None else pairs.ends.size(1)
    fit = (
        features is not None and features.shape == (count, x.size(1)) and x.size(0) == graph.num_rows == graph.num_cols
    )
    if not fit or not _native(graph, x, edge, factor):
        out = edge_messages(graph, *_of(x, edge, factor, pairs), act=acts[0], act2=acts[1])
        return out if scale is None else out + scale * x
    total: Tensor = _featured((graph, acts, scale, pairs), x, edge, factor)
    return total


def _of(x: Tensor, edge: Tensor | None, factor: Tensor | None, pairs: Pairs | None = None) -> tuple[Tensor | None, ...]:
    """The six terms of edge_messages; pairs: features of pairs, to be handed to each of their edges."""
    if pairs is not None:
        edge, factor = (None if t is None else gather_rows(t, pairs.number) for t in (edge, factor))
    return None, x, edge, None, None, factor


def _run_featured(plan: Any, x: Tensor, edge: Any, factor: Any) -> Tensor:
    graph, acts, scale, pairs = plan
    csr, x = graph.edge_csr if pairs is None else pairs.csr, x.contiguous()
    return cpu_edge.edge_messages(csr, _of(x, edge, factor), acts, root=None if scale is None else (x, scale))


def _plain_featured(plan: Any, x: Tensor, edge: Any, factor: Any) -> Tensor:
    graph, acts, scale, pairs = plan
    out = reference_edge.edge_messages(graph.edge_csr, _of(x, edge, factor, pairs), acts)
    return out if scale is None else out + scale * x


def _featured_gradients(
    plan: Any, saved: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool]
) -> tuple[Any, ...]:
    (graph, acts, scale, pairs), (x, edge, factor) = plan, saved
    made = cpu_edge.edge_messages_grad(
        *((graph.edge_csr, graph.T.edge_csr) if pairs is None else (pairs.csr, pairs.csr_t)),
        _of(x.contiguous(), edge, factor),
        acts,
        grads[0],
        (False, needs[0], needs[1], False, False, needs[2]),
        root=None if scale is None else (x, scale),
        pairs=None if pairs is None else pairs.ends,
    )
    return made[1], made[2], made[5]


_featured = differentiable("Featured", _run_featured, _featured_gradients, again=through(_plain_featured))


# ---- a Linear of data ----


def linear_of_data(data: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply the first d columns of data with weight', and add bias. data [E, d + 1], weight [o, d] -> [E, o].

    The data are constant, and end in a column of ones.

    That column makes the bias and its gradient parts of the products: no pass over [E, o] for either.
    """
    if bias is None:
        return dense(data[:, :-1], weight)
    out: Tensor = _linear_of_data(None, data, weight, bias)
    return out


def _linear_gradients(_: None, saved: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool]) -> tuple[Any, ...]:
    (data,), turned = saved, grads[0].t()
    plain = torch.is_grad_enabled() or not on_host(data)
    both = turned @ data if plain else product_in_blocks(turned, data)
    return None, both[:, :-1], both[:, -1]


_linear_of_data = differentiable(
    "LinearOfData",
    lambda _, data, weight, bias: data @ torch.cat([weight, bias.unsqueeze(1)], dim=1).t(),
    _linear_gradients,
    saves=1,
)


# ---- the activation of SchNet's filters ----


def shifted_softplus(x: Tensor, shift: float) -> Tensor:
    """log(1 + e^x) - shift. x of any shape."""
    plain = not library.traced(x) and x.dtype in (torch.float32, torch.float64) and x.numel()
    if not plain or not backend(x.device).native:
        return torch.nn.functional.softplus(x) - shift
    out: Tensor = _softplus(shift, x)
    return out


_softplus = differentiable(
    "Softplus",
    lambda shift, x: cpu_edge.softplus(x, shift),
    lambda shift, saved, grads, needs: (cpu_edge.softplus(saved[0], 0.0, grads[0]),),
    again=lambda shift, saved, grads, needs: (grads[0] * saved[0].sigmoid(),),
)
