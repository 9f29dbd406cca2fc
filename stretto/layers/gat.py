"""GATConv. The logits are x (W a): the attention vectors are folded into the weight, so the projected features serve
the values alone, and the weighted sum may be taken before the projection: one gather of x serves all heads. Where x is
much wider than what it becomes, they are (x W) a instead."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.utils import add_self_loops, remove_self_loops

from stretto import settings
from stretto.compile import CHOOSER, Order, Trial, best_order
from stretto.compile.cost import gat_on_cpu, gat_on_gpu
from stretto.graph import Graph
from stretto.kernels import has_own_memory
from stretto.layers import adjacency, edges
from stretto.layers.base import SMALL, Decline, Small, messages, note_order, weight_of
from stretto.layers.declines import same_type
from stretto.layers.features import linear_of_nonzeros
from stretto.layers.layer import SUM, Conv, Layer
from stretto.machine.rates import Profile
from stretto.ops import library, widened
from stretto.ops.attention import attention
from stretto.ops.attention_layer import attention_layer, takes
from stretto.ops.autograd_state import saved_elsewhere
from stretto.ops.dense import dense
from stretto.ops.folded_bias import larger, some_rows
from stretto.ops.projections import plus, projections
from stretto.ops.rows import all_reached


@dataclass(frozen=True)
class _Ends:
    """The features of both ends and the weights that act on them; x_dst None: of the receiving end nothing is read."""

    x: Tensor
    x_dst: Tensor | None
    own: bool  # whether the features of both are one tensor
    weight: Tensor
    weight_dst: Tensor | None

    @property
    def one(self) -> bool:
        """Whether the two ends share features and weight."""
        return self.own and self.weight_dst is self.weight

    def tried(self, trial: Trial) -> _Ends:
        """The same, as an order of evaluation is to be tried with them."""
        x, weight = trial.enter(self.x, self.weight)
        return _Ends(x, x if self.own else self.x_dst, self.own, weight, weight if self.one else self.weight_dst)


def fast(
    conv: Conv,
    x: Any,
    edge_index: Any,
    edge_attr: Tensor | None = None,
    size: Any = None,
    return_attention_weights: Any = None,
) -> Any:
    """What GATConv.forward computes."""
    ends, wanted = _ends(conv, x), bool(return_attention_weights)
    graph, edge_attr = _graph(conv, ends, edge_index, edge_attr, size)
    check_weights_wanted(edge_index, return_attention_weights)
    order, trial, key = ordered(graph, ends.x, ends.weight, conv.heads)
    first = order.name == FOLDED
    trial = None if wanted else trial
    ends = ends if trial is None else ends.tried(trial)
    avoided = messages(graph.num_edges, conv.heads * conv.out_channels, ends.x)
    if ends.one and not first:
        parts = (ends.weight, conv.att_src, conv.att_dst)
        if whole(conv, graph, ends.x, edge_attr, wanted, parts, (ends.weight, None)):
            note_order(conv, order, key, f"{REUSE}, one step", avoided)
            return one_step(conv, graph, "gat", ends.x, parts)
        if few_launches_decide(conv, graph):
            raise Small(SMALL)
    out, alpha = _attended(conv, graph, ends, edge_attr, first, wanted)
    note_order(conv, order, key, avoided=avoided)
    out = _finished(conv, graph, ends, out, first)
    if trial is not None:
        out = trial.leave(out)
    return (out, (edges_of(conv, graph, edge_index), alpha)) if wanted else out


def _ends(conv: Conv, x: Any) -> _Ends:
    x_src, x_dst, own = edges.ends(x)
    shared = conv.lin is not None
    weight = weight_of(conv.lin if shared else conv.lin_src, x_src)
    weight_dst = None if x_dst is None else weight_of(conv.lin if shared else conv.lin_dst, x_dst)
    same_type(x_src, conv.att_src, conv.att_dst, conv.bias, conv.att_edge)
    if weight.size(0) != conv.heads * conv.out_channels:
        raise Decline("the weight does not fit the layer")
    return _Ends(x_src, x_dst, own, weight, weight_dst)


def _graph(conv: Conv, ends: _Ends, edge_index: Any, edge_attr: Any, size: Any) -> tuple[Graph, Tensor | None]:
    """The graph and the edge attributes that the layer attends over, with its self-loops."""
    if size is not None and None in size:
        raise Decline("size is not complete")
    plain = edges.graph_between(conv, edge_index, ends.x, ends.x_dst, size)
    edge_attr = edge_features(conv, plain, edge_index, edge_attr, ends.x)
    edges.no_infinity(edge_attr)
    graph, edge_attr = looped(conv, plain, edge_attr)
    # of no edges stock does not look at it either: what it would have met has no gradient
    return graph, edge_attr if graph.num_edges else None


def _attended(
    conv: Conv, graph: Graph, ends: _Ends, edge_attr: Tensor | None, first: bool, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """The sum of values by attention, and its weights. first: of x, whose projection is still to come."""
    left, right, projected = _scores(conv, graph, ends, first)
    result = attention(
        graph,
        ends.x.unsqueeze(1) if projected is None else projected.view(-1, conv.heads, conv.out_channels),
        left,
        right,
        None if edge_attr is None else dense(edge_attr, fold(conv.lin_edge.weight, conv.att_edge)),
        form="gat",
        negative_slope=conv.negative_slope,
        dropout=conv.dropout if conv.training else 0.0,
        return_weights=wanted,
        dropped=True,
        bias=conv.bias if conv.concat and not first else None,
    )
    return (result[0], result[1]) if isinstance(result, tuple) else (result, None)


def _scores(conv: Conv, graph: Graph, ends: _Ends, first: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """The scores of the ends that receive and send, and x W' where that is made here (first: it is not)."""
    heads, x, weight = conv.heads, ends.x, ends.weight
    projected: list[Tensor]
    if first or x.size(1) < 2 * weight.size(0):
        logits = fold_both(weight, conv.att_src, conv.att_dst) if ends.one else fold(weight, conv.att_src)
        scores, *projected = projections(x, [(logits, None)] + ([] if first else [(weight, None)]))
    else:  # wide inputs, narrow outputs: reading x again would cost more than the logits of what it becomes
        of_nonzeros = linear_of_nonzeros(x, weight)
        projected = [*projections(x, [(weight, None)])] if of_nonzeros is None else [of_nonzeros]
        vectors = [per_head(att) for att in ((conv.att_src, conv.att_dst) if ends.one else (conv.att_src,))]
        scores = dense(projected[0], (torch.cat(vectors, 1) if ends.one else vectors[0]).t())
    right, left = scores.split(heads, dim=1) if ends.one else (scores, scores)
    if ends.x_dst is None or ends.weight_dst is None:
        left = right.new_zeros(graph.num_rows, heads)
    elif not ends.one:
        left = dense(ends.x_dst, fold(ends.weight_dst, conv.att_dst))
    return left, right, projected[0] if projected else None


def _finished(conv: Conv, graph: Graph, ends: _Ends, out: Tensor, first: bool) -> Tensor:
    """What follows the sum: the projection, if that comes after it, heads side by side or averaged, root and bias."""
    missing = conv.bias if first or not conv.concat else None
    if first:
        out, missing = _projected(conv, graph, out, ends.weight)
    else:
        out = heads_joined(conv, out)
    if conv.res is not None and ends.x_dst is not None:
        out = out + conv.res(ends.x_dst)
    return out if missing is None else plus(out, missing)


def _projected(conv: Conv, graph: Graph, out: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """The sums of x times the weight of their head, and the bias if that is still to be added."""
    reached = (conv.add_self_loops and graph.num_rows <= graph.num_cols) or all_reached(graph)
    if conv.heads == 1 and conv.bias is not None and reached and widened.takes(out.flatten(1), weight):
        return widened.widened(out.flatten(1), weight, conv.bias), None
    out = project(out, weight, conv.concat)
    return out if reached else edges.only_reached(graph, out), conv.bias


def heads_joined(conv: Conv, out: Tensor) -> Tensor:
    """Heads side by side or averaged, as the layer wants them. [n, h, c] -> [n, h * c] or [n, c]."""
    if out.dim() != 3:
        return out
    return out.flatten(1) if conv.concat else out.mean(dim=1)


def one_step(conv: Conv, graph: Graph, form: str, x: Tensor, parts: Any) -> Tensor:
    """The whole layer as one step."""
    drop = conv.dropout if conv.training else 0.0
    return attention_layer(graph, form, conv.heads, x, conv.bias, parts, slope=conv.negative_slope, dropout=drop)


def whole(conv: Conv, graph: Graph, x: Tensor, edge_attr: Any, wanted: Any, parameters: Any, values: Any) -> bool:
    """Whether the whole layer, of one set of nodes, runs as one step. values: weight and bias that make them of x."""
    if edge_attr is not None or wanted or conv.bias is None or conv.res is not None:
        return False
    if not conv.concat and conv.heads > 1:
        return False
    if not takes(graph, x, conv.out_channels, conv.bias, *parameters):
        return False
    learns = library.recorded(x, conv.bias, *parameters)
    return not learns or not larger(conv.bias, lambda: torch.nn.functional.linear(some_rows(x), *values).detach())


def few_launches_decide(conv: Conv, graph: Graph) -> bool:
    """Whether heads are averaged on a GPU (several steps of ours) and edges are so few that launches are all it costs.

    Measured: 13,000 to 60,000 edges, two layers of 4 x 64, 5 to 6.5 ms, stock's 0.8 of ours.
    """
    averaged = not conv.concat and conv.heads > 1
    return has_own_memory(graph.device) and averaged and graph.num_edges < adjacency.PASSING_EDGEWISE


def per_head(att: Tensor) -> Tensor:
    """Attention vectors as one matrix, each acting on its own head's channels. att [1, h, c] -> [h * c, h]."""
    heads, width = att.shape[-2:]
    own = torch.eye(heads, dtype=att.dtype, device=att.device).unsqueeze(1)
    return (att.view(heads, width, 1) * own).view(heads * width, heads)


def fold(weight: Tensor, att: Tensor) -> Tensor:
    """Attention vectors times the weight they act on. weight [h * c, i], att [1, h, c] -> [h, i]."""
    heads, width = att.shape[-2:]
    return torch.einsum("hci,hc->hi", weight.view(heads, width, weight.size(1)), att.view(heads, width))


def fold_both(weight: Tensor, att_src: Tensor, att_dst: Tensor) -> Tensor:
    """fold() with the attention vectors of both ends, one below the other. -> [2 h, i]."""
    if not library.recorded(weight, att_src, att_dst) or library.traced(weight):
        return torch.cat([fold(weight, att_src), fold(weight, att_dst)])
    result: Tensor = _FoldBoth.apply(weight, att_src, att_dst)  # type: ignore[no-untyped-call]
    return result


class _FoldBoth(torch.autograd.Function):
    """One step of autograd where two einsums and a cat would be a dozen launches each way."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, att_src: Tensor, att_dst: Tensor) -> Tensor:
        ctx.save_for_backward(weight, att_src, att_dst)
        heads, width = att_src.shape[-2:]
        stacked = weight.view(heads, width, -1)
        out = weight.new_empty(2 * heads, weight.size(1))
        for k, att in enumerate((att_src, att_dst)):
            torch.bmm(att.view(heads, 1, width), stacked, out=out[k * heads : (k + 1) * heads].unsqueeze(1))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        weight, att_src, att_dst = ctx.saved_tensors
        heads, width = att_src.shape[-2:]
        both = grads[0].view(2, heads, -1).transpose(0, 1)
        atts = torch.stack([att_src.view(heads, width), att_dst.view(heads, width)], dim=2)
        datts = torch.bmm(weight.view(heads, width, -1), both.transpose(1, 2))
        dweight = torch.bmm(atts, both).view_as(weight)
        return dweight, datts[..., 0].reshape(att_src.shape), datts[..., 1].reshape(att_dst.shape)


# Equal orders of evaluation. (alpha X) W' with logits of X W', which the literature calls recompute, is the folded one
# and another GEMM besides: no input makes it the better one.
REUSE, FOLDED = "alpha (X W'), logits X (W' a)", "(alpha X) W', logits X (W' a)"


def ordered(graph: Graph, x: Tensor, weight: Tensor, heads: int) -> tuple[Order, Trial | None, Hashable]:
    """Whether to sum x (one gather of i, heads * i products per edge) before the GEMM rather than x W' after it; what
    times it, while that is not settled; and what the decision is kept under."""
    i, columns = x.size(1), weight.size(0)
    wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    # with all that a decision rests on
    fixed, threads, saved = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(), saved_elsewhere()
    mark = ("order of GAT", i, heads, columns, x.dtype, wanted, settings.torch_kernels(), saved, fixed, threads)
    key = graph._derived.get(mark)
    decision = None if key is None else CHOOSER.decision(key)
    if decision is not None:
        return decision.steady if saved else decision.chosen, None, key
    sizes = {"n": graph.num_rows, "m": graph.num_cols, "E": graph.num_edges, "i": i, "o": columns, "h": heads}
    size, here = x.element_size(), has_own_memory(x.device)
    reuse = Order(REUSE, (columns,), graph.num_cols * columns * size)
    folded = Order(FOLDED, (heads * i,), graph.num_rows * heads * i * size)

    def priced(rates: Profile) -> list[tuple[float, Order]]:
        if here:
            times = gat_on_gpu(rates, graph.num_edges, graph.num_rows, i, heads, columns // heads)
        else:
            times = gat_on_cpu(rates, sizes, heads, size, 3 if wanted else 1)
        few = graph.num_edges <= 2 * graph.num_rows  # a sum that hardly adds anything saves nothing
        return list(zip(times, (reuse,) if few and not here else (reuse, folded), strict=False))

    order, trial, key = best_order("GAT", priced, sizes, x, wanted)
    if trial is None:
        graph._derived[mark] = key
    return order, trial, key


def project(u: Tensor, weight: Tensor, concat: bool) -> Tensor:
    """Head h of u times head h of the weight, side by side or averaged. u [n, h, i], weight [h * c, i] -> [n, ...]."""
    n, heads, i = u.shape
    stacked = weight.view(heads, -1, i)
    if concat:
        return torch.einsum("nhi,hci->nhc", u, stacked).reshape(n, weight.size(0))
    return u.reshape(n, heads * i) @ stacked.permute(0, 2, 1).reshape(heads * i, -1) / heads


def edge_features(conv: Conv, graph: Graph, edge_index: Any, edge_attr: Any, x: Tensor) -> Tensor | None:
    """Edge attributes [E, d] where the layer has a use for them, or Decline."""
    if conv.lin_edge is None:
        return None
    if not edges.is_plain(edge_index):
        raise Decline("edge_dim with a sparse matrix")
    if edge_attr is None:
        return None
    found = edges.one_per_edge(graph, edge_attr, x)
    weight_of(conv.lin_edge, found.view(found.size(0), -1) if found.numel() else conv.lin_edge.weight)
    return found


def check_weights_wanted(edge_index: Any, wanted: Any) -> None:
    """Attention weights are handed out beside edges [2, E] only: stock writes them into a sparse matrix."""
    if wanted is not None and wanted is not False and not edges.is_plain(edge_index):
        raise Decline("return_attention_weights with a sparse matrix")


def looped(conv: Conv, graph: Graph, edge_attr: Tensor | None) -> tuple[Graph, Tensor | None]:
    """The graph and its edge attributes with self-loops, if the layer adds them."""
    if conv.add_self_loops:
        loops = min(graph.num_cols, graph.num_rows)
        edge_attr = edges.loop_attributes(conv, graph, edge_attr, loops, conv.fill_value)
        graph = edges.with_loops(conv, graph, loops)
    if edge_attr is not None and edge_attr.dim() == 1:
        edge_attr = edge_attr.view(-1, 1)
    return graph, edge_attr


def edges_of(conv: Conv, graph: Graph, edge_index: Tensor) -> Tensor:
    """The edge_index that belongs to the attention weights, as stock hands it out."""
    if not conv.add_self_loops:
        return edge_index
    if type(edge_index) is not Tensor:  # an EdgeIndex: what it knows of itself is for PyG to say
        loops = min(graph.num_cols, graph.num_rows)
        return add_self_loops(remove_self_loops(edge_index)[0], num_nodes=loops)[0]
    found = graph.edge_index.to(edge_index.dtype)
    return found.flip(0) if conv.flow == "target_to_source" else found.clone()


LAYER = Layer(pyg.GATConv, fast, aggr=SUM, local=True)
