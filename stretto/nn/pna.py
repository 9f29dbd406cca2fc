"""PNAConv. With one pre-layer a message is u_i + v_j (+ w_e): every aggregation is taken of v_j alone, since mean, max
and min move with u_i and the deviation does not see it; scalers act after the first post-Linear, not on copies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import aggr as stock

from stretto.graph import Graph
from stretto.nn import edges
from stretto.nn.base import Decline, record_of
from stretto.nn.gin import hooked
from stretto.ops import spmm

KNOWN = {
    stock.SumAggregation: "sum",
    stock.MeanAggregation: "mean",
    stock.MaxAggregation: "max",
    stock.MinAggregation: "min",
    stock.VarAggregation: "var",
    stock.StdAggregation: "std",
}
SCALERS = ("identity", "amplification", "attenuation", "linear", "inverse_linear")
LEAST = 1e-5  # stock's threshold below which a variance counts as 0


def fast(conv: Any, x: Tensor, edge_index: Any, edge_attr: Tensor | None = None) -> Tensor:
    """What PNAConv.forward computes."""
    edge_index, edge_attr, _ = edges.unpacked(edge_index, edge_attr)
    x, _, _ = edges.ends(x)
    names = _aggregations(conv)
    if any(len(nn) != 1 for nn in conv.pre_nns):
        raise Decline("pre_layers > 1")
    if hooked(*conv.pre_nns, *(nn[0] for nn in conv.post_nns), *conv.post_nns):
        raise Decline("a hook is registered on a network inside")
    graph = edges.plain_graph(conv, edge_index, x, x)
    attr = None if edge_attr is None else edges.one_per_edge(graph, edge_attr, x)
    if (attr is None) != (conv.edge_dim is None) or (attr is not None and attr.dim() != 2):
        raise Decline("edge_attr and edge_dim disagree")
    towers, width = conv.towers, conv.F_in
    if x.size(1) != (towers * width if conv.divide_input else width):
        raise Decline("x does not fit the layer")
    parts = [edges.split_weight(nn[0], x, *[width] * (2 if attr is None else 3)) for nn in conv.pre_nns]
    own, other = torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])
    biases = torch.stack([nn[0].bias for nn in conv.pre_nns])
    each = x.view(-1, towers, width) if conv.divide_input else x.view(-1, 1, width).expand(-1, towers, -1)
    u = _towers(x, own, conv.divide_input) + biases
    v = _towers(x, other, conv.divide_input).reshape(-1, towers * width)
    if attr is None:
        record_of(conv).plan = "u_i + aggregate(A, X W'), scalers after the GEMM"
        found = _aggregate(graph, v, names)
    else:
        record_of(conv).plan = "u_i + aggregate(X_j W' + E W_e'), scalers after the GEMM"
        third = torch.stack([p[2] for p in parts])
        w = torch.einsum("ef,tof->eto", conv.edge_encoder(attr), third).reshape(-1, towers * width)
        found = _aggregate_edges(graph, edges.at_sources(graph, v) + w, names)
    shape = (-1, towers, width) if graph.num_rows else (0, towers, width)
    moved = [_moved(graph, name, value.reshape(shape), u) for name, value in zip(names, found, strict=True)]
    out = torch.cat(moved, dim=-1)
    scales = _scales(conv.aggr_module, graph, x.dtype)
    return conv.lin(torch.cat([_post(conv.post_nns[t], each[:, t], out[:, t], scales) for t in range(towers)], dim=1))


def _aggregations(conv: Any) -> list[str]:
    """The names of the layer's aggregations, or Decline."""
    scaler = conv.aggr_module
    if not isinstance(scaler, stock.DegreeScalerAggregation) or any(s not in SCALERS for s in scaler.scaler):
        raise Decline("unknown aggregation or scaler")
    inner = scaler.aggr
    modules = list(inner.aggrs) if isinstance(inner, stock.MultiAggregation) else [inner]
    if isinstance(inner, stock.MultiAggregation) and inner.mode != "cat":
        raise Decline(f"aggregations are combined by {inner.mode}")
    names = [next((name for kind, name in KNOWN.items() if edges.is_stock(m, kind)), "") for m in modules]
    variances: list[Any] = [
        m if name == "var" else m.var_aggr for m, name in zip(modules, names, strict=True) if name in ("var", "std")
    ]
    if "" in names or any(v.semi_grad for v in variances):
        raise Decline("an aggregation other than sum, mean, max, min, var and std")
    return names


def _towers(x: Tensor, weight: Tensor, divided: bool) -> Tensor:
    """Each tower's Linear on its part of x, or on all of it. weight [t, f, f] -> [n, t, f]."""
    t, f, _ = weight.shape
    if divided:
        return torch.einsum("ntf,tof->nto", x.view(x.size(0), t, f), weight)
    return (x @ weight.reshape(t * f, -1).t()).view(x.size(0), t, f)


def _aggregate(graph: Graph, v: Tensor, names: list[str]) -> list[Tensor]:
    """Every aggregation of v_j. v [m, k] -> [n, k] each."""
    spread = "var" in names or "std" in names
    mean = square = None
    if spread:
        mean, square = spmm(graph, torch.cat([v, v * v], dim=1), reduce="mean").split(v.size(1), dim=1)
    elif "mean" in names:
        mean = spmm(graph, v, reduce="mean")
    return [_one(name, mean, square, lambda n: spmm(graph, v, reduce=n)) for name in names]


def _aggregate_edges(graph: Graph, message: Tensor, names: list[str]) -> list[Tensor]:
    """Every aggregation of messages on edges. message [E, k] -> [n, k] each."""
    mean = square = None
    if "var" in names or "std" in names:
        square = edges.reduce_edges(graph, message * message, "mean")
    if square is not None or "mean" in names:
        mean = edges.reduce_edges(graph, message, "mean")
    return [_one(name, mean, square, lambda n: edges.reduce_edges(graph, message, n)) for name in names]


def _one(name: str, mean: Tensor | None, square: Tensor | None, reduce: Any) -> Tensor:
    if name == "mean":
        assert mean is not None
        return mean
    if name in ("var", "std"):
        assert mean is not None
        assert square is not None
        var = square - mean * mean
        if name == "var":
            return var
        std = var.clamp(min=LEAST).sqrt()
        return std.masked_fill(std <= LEAST**0.5, 0.0)
    return reduce(name)


def _moved(graph: Graph, name: str, value: Tensor, u: Tensor) -> Tensor:
    """The aggregation of u_i + v_j from that of v_j; nodes without edges stay 0. [n, t, f]."""
    if name in ("var", "std"):
        return value
    count = graph.degree.to(u.dtype).unsqueeze(1) if name == "sum" else edges.has_edges(graph, u.dtype)
    return value + u * count.unsqueeze(2)


def _scales(scaler: Any, graph: Graph, dtype: torch.dtype) -> list[Tensor | None]:
    """The factor [n, 1] of each scaler; None for identity."""
    degree = graph.degree.to(dtype).unsqueeze(1)
    least = degree.clamp(min=1)
    makers = {
        "identity": lambda: None,
        "amplification": lambda: torch.log(degree + 1) / scaler.avg_deg_log,
        "attenuation": lambda: scaler.avg_deg_log / torch.log(least + 1),
        "linear": lambda: degree / scaler.avg_deg_lin,
        "inverse_linear": lambda: scaler.avg_deg_lin / least,
    }
    return [makers[name]() for name in scaler.scaler]


def _post(nn: Any, x: Tensor, out: Tensor, scales: list[Tensor | None]) -> Tensor:
    """nn([x, s_1 out, s_2 out, ...]): the first Linear acts before the scales. x [n, f], out [n, a f] -> [n, o]."""
    first = nn[0]
    parts = edges.split_weight(first, x, x.size(1), *[out.size(1)] * len(scales))
    total = torch.nn.functional.linear(x, parts[0], first.bias)
    pieces = (out @ torch.cat(parts[1:]).t()).split(first.weight.size(0), dim=1)
    for piece, scale in zip(pieces, scales, strict=True):
        total = total + (piece if scale is None else piece * scale)
    for module in list(nn)[1:]:
        total = module(total)
    return total
