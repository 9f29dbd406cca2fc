"""PNAConv. With one pre-layer a message is u_i + v_j (+ w_e): every aggregation is taken of v_j alone, since mean, max
and min move with u_i and the deviation does not see it; scalers act after the first post-Linear, not on copies. Edge
features and further pre-layers make messages on edges; all aggregations then share one pass over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.nn import aggr as stock

from stretto.graph import Graph
from stretto.layers import edges
from stretto.layers.base import Decline, hooked, note, weight_of
from stretto.layers.edges import streaming
from stretto.layers.layer import Conv, Layer
from stretto.ops import statistics
from stretto.ops.dense import plus_dense

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


def fast(conv: Conv, x: Tensor, edge_index: Any, edge_attr: Tensor | None = None) -> Tensor:
    """What PNAConv.forward computes."""
    edge_index, edge_attr, _ = edges.unpacked(conv, edge_index, edge_attr)
    x, _, _ = edges.ends(x)
    names = _names(conv)
    if hooked(*conv.pre_nns, *(nn[0] for nn in conv.post_nns), *conv.post_nns):
        raise Decline("a hook is registered on a network inside")
    graph = edges.plain_graph(conv, edge_index, x, x)
    attr = _attributes(conv, graph, edge_attr, x)
    finite = edges.no_infinity(x, attr)
    towers, width = conv.towers, conv.F_in
    if x.size(1) != (towers * width if conv.divide_input else width):
        raise Decline("x does not fit the layer")
    parts = [edges.split_weight(nn[0], x, *[width] * (2 if attr is None else 3)) for nn in conv.pre_nns]
    own, other, *third = (torch.stack(each) for each in zip(*parts, strict=True))
    _check_post(conv, x.new_empty(0, width), len(names))
    biases = torch.stack([edges.bias_of(nn[0]) for nn in conv.pre_nns])
    target, source = (x, x) if finite else (edges.only_read(graph, x, target=end) for end in (True, False))
    u = _towers(target, own, conv.divide_input) + biases
    v = _towers(source, other, conv.divide_input).reshape(-1, towers * width)
    deeper = any(len(nn) > 1 for nn in conv.pre_nns)
    if attr is None and not deeper and len(set(names)) == len(names):
        note(conv, "u_i + statistics of X_j W' in one pass, scalers after the GEMM")
        each_name = statistics(graph, v, u.reshape(-1, towers * width), names=names)
        out = each_name.view(graph.num_rows, len(names), towers, width).transpose(1, 2).flatten(2)
    else:
        out = _from_edges(conv, graph, u, v, attr, third[0] if third else None, names, deeper=deeper)
    each = x.view(-1, towers, width) if conv.divide_input else x.view(-1, 1, width).expand(-1, towers, -1)
    scales = _scales(conv.aggr_module, graph, x.dtype)
    towered = [_post(conv.post_nns[t], each[:, t], out[:, t], scales) for t in range(towers)]
    result: Tensor = conv.lin(torch.cat(towered, dim=1))
    return result


def _attributes(conv: Conv, graph: Graph, edge_attr: Any, x: Tensor) -> Tensor | None:
    """The features of edges, where the layer takes some, or Decline."""
    attr = None if edge_attr is None else edges.one_per_edge(graph, edge_attr, x)
    if (attr is None) != (conv.edge_dim is None) or (attr is not None and attr.dim() != 2):
        raise Decline("edge_attr and edge_dim disagree")
    if attr is not None:
        weight_of(conv.edge_encoder, attr, bias=True)
    return attr


def _from_edges(
    conv: Conv,
    graph: Graph,
    u: Tensor,
    v: Tensor,
    attr: Tensor | None,
    third: Tensor | None,
    names: list[str],
    *,
    deeper: bool,
) -> Tensor:
    """All aggregations of messages that are made on edges, side by side. -> [n, t, names * f]."""
    values = _aggregate_edges(conv, graph, u, v, attr, third, names, deeper=deeper)
    shape = (-1, conv.towers, conv.F_in) if graph.num_rows else (0, conv.towers, conv.F_in)
    shifted = None if deeper else u
    moved = [_moved(graph, name, value.reshape(shape), shifted) for name, value in zip(names, values, strict=True)]
    if shifted is not None and set(names) <= {"var", "std"}:  # it is in none of them: a gradient of 0, as stock's
        moved[0] = _moved(graph, "mean", moved[0], 0 * shifted)
    return torch.cat(moved, dim=-1)


def _aggregations(conv: Conv) -> tuple[Any, list[Any]]:
    """The module that combines the layer's aggregations, and those. One alone combines nothing."""
    inner = conv.aggr_module.aggr
    return inner, list(inner.aggrs) if edges.is_stock(inner, stock.MultiAggregation) else [inner]


def _names(conv: Conv) -> list[str]:
    """Of the layer's aggregations; "": another than those we know."""
    _, modules = _aggregations(conv)
    return [next((name for kind, name in KNOWN.items() if edges.is_stock(m, kind)), "") for m in modules]


def _why_scalers(conv: Conv) -> str | None:
    scaler = conv.aggr_module
    known = edges.is_stock(scaler, stock.DegreeScalerAggregation)
    if not known or any(s not in SCALERS for s in scaler.scaler):
        return "unknown aggregation or scaler"
    inner, modules = _aggregations(conv)
    several = modules != [inner]
    return f"aggregations are combined by {inner.mode}" if several and inner.mode != "cat" else None


def _why_aggregations(conv: Conv) -> str | None:
    (inner, modules), names = _aggregations(conv), _names(conv)
    variances: list[Any] = [
        m if name == "var" else m.var_aggr for m, name in zip(modules, names, strict=True) if name in ("var", "std")
    ]
    plain = all(edges.is_stock(v, stock.VarAggregation) and not v.semi_grad for v in variances)
    if "" in names or not plain:
        return "an aggregation other than sum, mean, max, min, var and std"
    if hooked(inner, *modules, *variances):
        return "a hook is registered on an aggregation inside, or its forward was replaced"
    return None


def _check_post(conv: Conv, rows: Tensor, count: int) -> None:
    """Decline before anything has run, unless every tower's post-layer starts with a plain Linear. rows [0, f]."""
    width = rows.size(1)
    for nn in conv.post_nns:
        edges.split_weight(nn[0], rows, width, *[count * width] * len(conv.aggr_module.scaler))


def _towers(x: Tensor, weight: Tensor, divided: bool) -> Tensor:
    """Each tower's Linear on its part of x, or on all of it. weight [t, f, f] -> [n, t, f]."""
    t, f, _ = weight.shape
    if divided:
        return torch.einsum("ntf,tof->nto", x.view(x.size(0), t, f), weight)
    return (x @ weight.reshape(t * f, -1).t()).view(x.size(0), t, f)


def _aggregate_edges(
    conv: Conv,
    graph: Graph,
    u: Tensor,
    v: Tensor,
    attr: Tensor | None,
    third: Tensor | None,
    names: list[str],
    *,
    deeper: bool,
) -> list[Tensor]:
    """Every aggregation of messages that edges make: u_i + v_j [+ e W'], and the further pre-layers if deeper.

    u [n, t, f], v [m, t * f], attr [E, d], third [t, f, f] -> [n, t * f] each. Where nothing follows, u has no part in
    the messages, and is missing from sum and mean.
    """
    towers, width = conv.towers, conv.F_in
    own = u.reshape(-1, towers * width)
    rests = [list(nn)[1:] for nn in conv.pre_nns]
    weight = bias = None
    if third is not None:  # the encoder and the part of the pre-layer that reads it are one Linear
        weight = torch.einsum("tof,fd->tod", third, conv.edge_encoder.weight).reshape(towers * width, -1)
        bias = torch.einsum("tof,f->to", third, edges.bias_of(conv.edge_encoder)).reshape(-1)
        v = v + bias

    def message(*ends: Tensor) -> Tensor:
        made = ends[0] + ends[1] if deeper else ends[0]
        if weight is not None:
            made = plus_dense(made, ends[-1], weight)
        if not deeper:
            return made
        each = made.view(-1, towers, width)
        return torch.cat([streaming.run(rest, each[:, t]) for t, rest in enumerate(rests)], dim=1)

    spread = "var" in names or "std" in names
    wanted: list[str] = [n for n in ("sum", "mean", "max", "min") if n in names or (n == "mean" and spread)]
    wanted += ["square"] if spread else []
    inner = [module for rest in rests for module in rest]
    parameters = [*([] if weight is None else [weight]), *streaming.parameters_of(inner)]
    values, how = streaming.reduced(
        graph,
        message,
        own if deeper else None,
        v,
        attr,
        wanted,
        width=towers * width,
        parameters=parameters,
        modules=inner,
        steady=streaming.row_by_row(inner, random=True),
        own=None if deeper else own,
    )
    note(conv, f"aggregations of messages made on edges, {how}, scalers after the GEMM", builds=how.builds)
    by_name = dict(zip(wanted, values, strict=True))
    return [_one(name, by_name.get("mean"), by_name.get("square"), by_name.__getitem__) for name in names]


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
    result: Tensor = reduce(name)
    return result


def _moved(graph: Graph, name: str, value: Tensor, u: Tensor | None) -> Tensor:
    """The sum or mean of u_i + v_j from that of v_j (u None: it has it); nodes without edges stay 0. [n, t, f]."""
    if u is None or name not in ("sum", "mean"):
        return value
    return edges.plus_own(graph, value.flatten(1), u.flatten(1), name).view(value.shape)


def _scales(scaler: Any, graph: Graph, dtype: torch.dtype) -> list[Tensor | None]:
    """The factor [n, 1] of each scaler; None for identity."""
    degree = graph.degree.to(dtype).unsqueeze(1)
    least = degree.clamp(min=1)
    makers: dict[str, Callable[[], Tensor | None]] = {
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


LAYER = Layer(
    pyg.PNAConv,
    fast,
    declines=(_why_scalers, _why_aggregations),
    message=lambda c, i, o: c.towers * c.F_in,
)
