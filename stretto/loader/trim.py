"""What each layer of a model needs of a batch, so that it computes nothing that is thrown away.

`layers(batch)` lists, from the first layer to the last, the edges a layer uses and how many sources and targets they
have. A bipartite conv then takes `conv((x, x[:num_targets]), edge_index)`. Graph.of knows every one of these edge
indices. `run_trimmed(model, batch)` does that for PyG's BasicGNN models. (PyG's own trim_to_layer works on the batches
too; it keeps each layer's graph square, and so computes every layer's outermost nodes in vain.)
"""

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn.models.basic_gnn import BasicGNN

from stretto.errors import expect
from stretto.graph import Graph
from stretto.kernels import on_host
from stretto.layers import CONVS
from stretto.layers.layer import stock_of

# Normalisations that treat every row alone once they are in evaluation mode.
ROWWISE = ("BatchNorm", "LayerNorm", "BatchNorm1d", "Identity")


class Layer(NamedTuple):
    """edge_index [2, E] of one layer, size (number of sources, number of targets), edges [start, stop) of the batch."""

    edge_index: Tensor
    size: tuple[int, int]
    edges: tuple[int, int]


def layers(batch: Any, *, semantics: str = "frontier") -> list[Layer]:
    """The layers of a batch of a homogeneous graph, the widest first."""
    nodes, edges = batch.num_sampled_nodes, batch.num_sampled_edges
    expect(
        isinstance(nodes, list),
        "layers: the batch has no 'num_sampled_nodes' as a list; wanted one of a homogeneous graph",
    )
    known, sampled = list(accumulate(nodes)), [0, *accumulate(edges)]
    expect(
        _is_as_given(batch),
        f"layers: 'edge_index' has {batch.edge_index.size(1)} edges, wanted {sampled[-1]}, those of "
        "'num_sampled_edges', of nodes as 'num_sampled_nodes' has them: the batch was changed since the loader gave it",
    )
    whole = Graph.of(batch.edge_index, known[-1]) if semantics == "frontier" else None
    out = []
    for hop in reversed(range(len(edges))):
        size = (known[hop + 1], known[hop])
        start = 0 if semantics == "frontier" else sampled[hop]
        edge_index = batch.edge_index[:, start : sampled[hop + 1]]
        if whole is not None and _ends_with(whole, size[1], sampled[hop + 1]):
            assert whole.csr.col is not None
            rowptr, col = whole.csr.rowptr[: size[1] + 1], whole.csr.col[: sampled[hop + 1]]
            Graph.remember(edge_index, Graph.of_pointers(rowptr, col, size[0], known=True), size)
        out.append(Layer(edge_index, size, (start, sampled[hop + 1])))
    return out


def _is_as_given(batch: Any) -> bool:
    """Whether there are as many nodes and edges as the hops have between them."""
    nodes, edges = batch.num_sampled_nodes, batch.num_sampled_edges
    if sum(edges) != batch.edge_index.size(1) or len(nodes) != len(edges) + 1 or min(*nodes, *edges, 0) < 0:
        return False
    return batch.get("x") is None or batch.x.size(0) == sum(nodes)


def _ends_with(graph: Graph, num_targets: int, num_edges: int) -> bool:
    """Whether the first edges are the first targets'; on a device, where looking means waiting, that is trusted."""
    csr = graph.csr
    if csr.edge_id is not None or csr.col is None or csr.num_rows < num_targets:
        return False
    return not on_host(csr.rowptr) or int(csr.rowptr[num_targets]) == num_edges


def trimmed(batch: Any, *, semantics: str = "frontier") -> Any:
    """The batch with its `layers`."""
    batch.layers = layers(batch, semantics=semantics)
    return batch


def run_trimmed(model: Any, batch: Any, *, semantics: str = "frontier") -> Tensor:
    """The model's output for the seeds of a batch. -> [batch_size, ...].

    Where the model allows, every layer computes only the nodes the next one reads; elsewhere the whole batch is run.
    Gradients, dropout and evaluation are the model's own either way.
    """
    x: Tensor = batch.x
    whole = bool(why_not_trimmed(model))
    if isinstance(batch.num_sampled_nodes, list) and not _is_as_given(batch):  # the user dropped some edges, say
        whole = True
    known = [] if whole else getattr(batch, "layers", None) or layers(batch, semantics=semantics)
    if whole or len(known) != model.num_layers:
        x = model(x, batch.edge_index)[: batch.batch_size]
        return x
    for i, layer in enumerate(known):
        x = model.convs[i]((x, x[: layer.size[1]]), layer.edge_index)
        x = x if i == model.num_layers - 1 else _between(model, i, x)
    return x


def run_by_hops(model: Any, x: Tensor, edge_index: Tensor, nodes: list[int], edges: list[int]) -> Tensor | None:
    """What the model's forward gives for these num_sampled_nodes_per_hop and num_sampled_edges_per_hop.

    PyG's trim_to_layer drops, before each layer, the outermost nodes the layer before has computed; here no layer
    computes them. None where that cannot be known to be the same: the model is not local, or edge_index is not as a
    loader gave it.
    """
    count = model.num_layers
    hooked = any(conv._forward_hooks or conv._forward_pre_hooks for conv in model.convs)
    if hooked or why_not_trimmed(model) or not on_host(x) or not count <= min(len(nodes) - 1, len(edges)):
        return None
    n, m = x.size(0), edge_index.size(1)
    if n != sum(nodes) or m != sum(edges) or not Graph.is_known(edge_index, (n, n)):
        return None
    csr = Graph.of(edge_index, n).csr
    if csr.edge_id is not None or csr.col is None:
        return None
    for i, conv in enumerate(model.convs):
        if i > 0:
            n, m = n - nodes[-i], m - edges[-i]
        rows = n - nodes[-i - 1]  # what the next layer reads, and all that has edges here
        if int(csr.rowptr[rows]) != m:
            return None
        part, x, last = edge_index[:, :m], x[:n], i == count - 1
        size = (n, n) if last else (n, rows)  # the last layer's outermost nodes are part of the output
        rowptr = csr.rowptr[: size[1] + 1]
        Graph.remember(
            part, Graph.of_pointers(rowptr.clamp(max=m) if last else rowptr, csr.col[:m], n, known=True), size
        )
        x = conv(x if last else (x, x[:rows]), part)
        if not last:
            x = _between(model, i, x)
    return x


def _between(model: Any, i: int, x: Tensor) -> Tensor:
    """What a BasicGNN does after layer i, but for the last."""
    if model.act is not None and model.act_first:
        x = model.act(x)
    x = model.norms[i](x)
    if model.act is not None and not model.act_first:
        x = model.act(x)
    x = model.dropout(x)
    return x


def why_not_trimmed(model: Any) -> str:
    """Why a batch's layers must see all of its nodes; empty when they need not."""
    why = why_not_local(model)
    if not why and _written_by_user(model) is not BasicGNN.forward:
        why = f"{type(model).__name__} has a forward of its own"
    if not why and (model._forward_hooks or model._forward_pre_hooks):
        why = "the model has hooks"
    if not why and any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) and m.training for m in model.modules()):
        why = "BatchNorm learns from all nodes of a batch"
    return why


def why_not_local(model: Any) -> str:
    """Why the model cannot be run layer by layer on parts of a graph; empty when it can."""
    if not hasattr(model, "inference_per_layer") or not hasattr(model, "convs"):
        return f"{type(model).__name__} has no inference_per_layer (PyG's BasicGNN has)"
    if getattr(model, "jk_mode", None) is not None:
        return "jumping knowledge needs the output of every layer"
    for conv in model.convs:
        if not any(kind in CONVS and CONVS[kind].local for kind in type(conv).__mro__):
            return f"{type(conv).__name__} needs more than a node's own neighbours"
    for norm in model.norms or ():
        if type(norm).__name__ not in ROWWISE or getattr(norm, "mode", "node") != "node":
            return f"{type(norm).__name__} needs all nodes at once"
    return ""


def _written_by_user(model: Any) -> Any:
    """The model's forward as it was before accelerate() put a class of its own in front."""
    own = (vars(c).get("forward") for c in type(model).__mro__ if stock_of(c) is None)
    return next((forward for forward in own if forward is not None), None)
