"""From what a user hands to a conv (edge_index in any format, weights, sizes) to the Adjacency a plan multiplies by.

Everything that depends on the graph alone is kept on the Graph: it is computed in the first step and looked up after.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from stretto.compile import Adjacency
from stretto.graph import Graph
from stretto.graph.derived import lasting
from stretto.kernels import has_own_memory
from stretto.kernels.looks import settled
from stretto.layers import base
from stretto.layers.base import Decline, Small
from stretto.layers.layer import Conv
from stretto.lifetime import popped_from
from stretto.ops.autograd_state import saved_elsewhere

# Edges below which a new edge_index on a GPU costs the host more to sort than stock's step takes (docs/gpu.md): a layer
# takes it as stock the first time it sees it. A loader that knows its batches' CSR, or a graph used again, runs fast.
PASSING = 600_000
PASSING_EDGEWISE = 260_000  # of layers whose stock form makes several arrays an edge: attention and the like
_glimpsed: weakref.WeakKeyDictionary[Any, dict[int, weakref.ref[Tensor]]] = weakref.WeakKeyDictionary()


def pass_by(conv: Conv, edge_index: Any, sizes: tuple[int, int], fewest: int, few: int, flow: str) -> None:
    """Decline a small edge_index on a device that this layer has not seen before and nobody has built the graph of.

    fewest: edges from which on it is not small; few: below which it is, also where it was seen before.
    """
    if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
        return
    if not has_own_memory(edge_index.device):
        return
    if edge_index.size(1) < min(fewest, few):
        raise Small(base.SMALL)
    if edge_index.size(1) >= fewest or saved_elsewhere() or Graph.is_known(edge_index, sizes, flow=flow):
        return
    seen = _glimpsed.setdefault(conv, {})
    known = seen.get(id(edge_index))
    if known is not None and known() is edge_index:
        return
    if len(seen) >= 64:
        seen.clear()
    seen[id(edge_index)] = weakref.ref(edge_index)
    raise Small("a small batch not seen before: stock costs a GPU's host less than building its graph")


def graph_of(
    conv: Conv,
    edge_index: Any,
    num_src: int,
    num_dst: int,
    passing: int | None = None,
    flow: str | None = None,
    *,
    few: int = 0,
) -> Graph:
    """The graph of a conv's input, rows the nodes that receive messages under the conv's flow, or the one given."""
    flow = conv.flow if flow is None else flow
    sizes = (num_dst, num_src) if flow == "target_to_source" else (num_src, num_dst)
    pass_by(conv, edge_index, sizes, PASSING if passing is None else passing, few, flow)
    if isinstance(edge_index, Tensor) and edge_index.layout == torch.strided and edge_index.dtype not in INDEX:
        raise Decline(f"edge_index is {edge_index.dtype}")
    if isinstance(edge_index, Tensor) and edge_index.dim() != 2:
        raise Decline("edge_index is a sparse matrix of vectors")
    if isinstance(edge_index, Tensor):
        _coalesced(edge_index)
        if type(edge_index) is not Tensor:
            sizes_agree(edge_index, num_src, num_dst)
    else:
        values = values_of(edge_index)
        if values is not None and values.dim() > 1:  # stock hands them to message() as edge_attr
            raise Decline("a SparseTensor with a vector of values per entry")
    if flow == "target_to_source":
        if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
            raise Decline("flow target_to_source with a sparse matrix")
        return Graph.of(edge_index, (num_dst, num_src), flow="target_to_source")
    return Graph.of(edge_index, (num_src, num_dst))


def destinations(edge_index: Any, size: Any, x_dst: Tensor | None, x: Tensor) -> int:
    """How many nodes receive messages, as PyG infers it."""
    if isinstance(edge_index, Tensor) and edge_index.layout != torch.strided:
        return edge_index.size(0)
    if hasattr(edge_index, "sparse_sizes"):  # a SparseTensor, whose rows receive
        return int(edge_index.sparse_sizes()[0]) if x_dst is None else x_dst.size(0)
    if hasattr(edge_index, "sparse_size"):  # an EdgeIndex: what it knows of itself counts, and `size` does not
        size = edge_index.sparse_size()
    known = None
    if size is not None:
        num_src, known = size
        if not all(s is None or isinstance(s, int) for s in size):
            raise Decline("size holds no numbers")
        if num_src not in (None, x.size(0)) or (x_dst is not None and known not in (None, x_dst.size(0))):
            raise Decline("size and x disagree")
    if x_dst is not None:
        return x_dst.size(0)
    return x.size(0) if known is None else int(known)


def sizes_agree(edge_index: Any, num_src: int, num_dst: int) -> None:
    """Decline an EdgeIndex that knows of other numbers of nodes."""
    known = edge_index.sparse_size() if hasattr(edge_index, "sparse_size") else (None, None)
    if known[0] not in (None, num_src) or known[1] not in (None, num_dst):
        raise Decline("the EdgeIndex and x disagree on the number of nodes")


INDEX = (torch.int64, torch.int32)


def values_of(edge_index: Any) -> Tensor | None:
    """The values of a sparse adjacency, in the order its Graph counts edges; None for a plain edge_index."""
    if isinstance(edge_index, Tensor):
        if edge_index.layout == torch.strided:
            return None
        _coalesced(edge_index)
        return edge_index.values()  # not _values(): gradients flow through these
    return edge_index.coo()[2] if hasattr(edge_index, "coo") else None


def _coalesced(edge_index: Tensor) -> None:
    """Decline a COO matrix with duplicates: stock adds them up first, which a mean or a maximum notices."""
    if edge_index.layout == torch.sparse_coo and not edge_index.is_coalesced():
        raise Decline("a sparse matrix that is not coalesced")


def weights_in(graph: Graph, edge_index: Any, x: Tensor) -> Tensor | None:
    """What a layer without edge weights multiplies by: the values of a torch sparse matrix, None where all are 1.

    A SparseTensor's values such layers drop. That all are 1 is looked up once, until the matrix is edited.
    """
    if not isinstance(edge_index, Tensor) or edge_index.layout == torch.strided:
        return None
    values = values_of(edge_index)
    assert values is not None
    if not values.requires_grad and kept_for(graph, "values are 1", edge_index, lambda: bool((values == 1).all())):
        return None
    return weighted(graph, values, x)


def weighted(graph: Graph, edge_weight: Tensor | None, x: Tensor) -> Tensor | None:
    """An edge weight fit for spmm: one per edge, of x's type."""
    if edge_weight is None:
        return None
    if not isinstance(edge_weight, Tensor) or edge_weight.layout != torch.strided or edge_weight.device != x.device:
        raise Decline("edge_weight is no dense tensor where the input is")
    if edge_weight.numel() != graph.num_edges:
        raise Decline(f"edge_weight has {edge_weight.numel()} entries for {graph.num_edges} edges")
    if edge_weight.dtype != x.dtype and torch.promote_types(edge_weight.dtype, x.dtype) != x.dtype:
        raise Decline(f"edge_weight is {edge_weight.dtype}, the input {x.dtype}")
    return edge_weight.reshape(-1).to(x.dtype)


def gcn(conv: Conv, x: Tensor, edge_index: Any, edge_weight: Tensor | None, **options: Any) -> Adjacency:
    """GCN's normalised adjacency. options: improved, add_self_loops, as gcn_norm takes them.

    Without weights it is the graph with self-loops and two scalings, fused into the kernel: no array of edge weights.
    With weights, PyG's own gcn_norm makes them, once per weight tensor.
    """
    n = x.size(0)
    graph = graph_of(conv, edge_index, n, n)
    loops = options.get("add_self_loops", True)
    if (
        values_of(edge_index) is None
        and edge_weight is None
        and isinstance(edge_index, Tensor)
        and edge_index.layout == torch.strided
    ):
        target = graph.with_self_loops if loops else graph
        scale = target.degree_power(-0.5, _scale_type(x.dtype))
        return Adjacency(target, scale, scale)
    normalised, weight = _normalised(conv, graph, x, edge_index, edge_weight, options)
    return Adjacency(normalised, weight=weight)


def as_given(conv: Conv, x: Tensor, edge_index: Any, edge_weight: Tensor | None) -> Adjacency:
    """The adjacency as it is, with the weights that come beside it or are its values."""
    graph = graph_of(conv, edge_index, x.size(0), x.size(0))
    values = values_of(edge_index)
    return Adjacency(graph, weight=weighted(graph, edge_weight if values is None else values, x))


def gcn_of(conv: Conv, x: Tensor, edge_index: Any, edge_weight: Tensor | None, *, improved: bool = False) -> Adjacency:
    """GCN's normalised adjacency of a layer with `normalize`, `cached` and `add_self_loops`, as stock keeps it."""
    if not conv.normalize:
        return as_given(conv, x, edge_index, edge_weight)
    if not conv.cached and conv._cached_edge_index is None:
        return gcn(conv, x, edge_index, edge_weight, improved=improved, add_self_loops=conv.add_self_loops)
    if conv._cached_adj_t is not None or not isinstance(edge_index, Tensor):
        raise Decline("cached=True with a SparseTensor")
    n = x.size(0)
    if conv._cached_edge_index is None:  # the first graph is the graph for ever
        conv._cached_edge_index = gcn_norm(
            _plain(edge_index), edge_weight, n, improved, conv.add_self_loops, conv.flow, x.dtype
        )
    kept, weight = conv._cached_edge_index
    graph = graph_of(conv, kept, n, n)
    return Adjacency(graph, weight=weight if weight is not None else values_of(kept))


def _normalised(
    conv: Conv, graph: Graph, x: Tensor, edge_index: Any, edge_weight: Tensor | None, options: dict[str, Any]
) -> tuple[Graph, Tensor]:
    n = x.size(0)
    if edge_weight is not None and not isinstance(edge_weight, Tensor):
        raise Decline(f"edge_weight is a {type(edge_weight).__name__}")

    def make() -> tuple[Graph, Tensor]:
        found = gcn_norm(_plain(edge_index), edge_weight, n, flow=conv.flow, dtype=x.dtype, **options)
        found, weight = found if isinstance(found, tuple) else (found, None)  # of a SparseTensor it returns one
        if weight is None:
            weight = values_of(found)
        assert weight is not None
        if weight.dim() != 1:
            raise Decline("edge_weight is not one number an edge")
        of_found = graph_of(conv, found, n, n)
        of_edges = weighted(of_found, weight, x)
        assert of_edges is not None
        return of_found, of_edges

    if isinstance(edge_index, Tensor) and edge_index.requires_grad and torch.is_grad_enabled():
        raise Decline("the values of a sparse matrix need a gradient, and are to be normalised")
    key = ("gcn_norm", x.dtype, tuple(sorted(options.items())))
    own = edge_weight is None or values_of(edge_index) is not None  # beside which gcn_norm reads no other weights
    result: tuple[Graph, Tensor] = kept_for(graph, key, edge_index if own else edge_weight, make)
    return result


def kept_for(graph: Any, key: Hashable, source: Any, make: Callable[[], Any]) -> Any:
    """make()'s result, kept on the graph (or in another's `_derived`) while `source` is the same unchanged object.

    It goes with its source: a graph that is remembered longer does not hold what nobody can ask for again. What is made
    of a source that is trained is not kept, and carries its gradient where one is wanted.
    """
    value = _plain(source) if isinstance(source, Tensor) else values_of(source)  # those may be set anew
    look = () if value is None else settled(value)
    known = graph._derived.get(key)
    if known is not None and known[1] == look and known[0]() is source and known[2]:
        return known[2][0]
    if value is not None and value.requires_grad and torch.is_grad_enabled():
        return make()
    with lasting(), torch.no_grad():  # what an evaluation makes, training saves for backward
        made = make()
    if look is not None:
        cell = {0: made}  # emptied when the source is gone
        graph._derived[key] = (popped_from(cell, 0, source), look, cell)
    return made


def _plain(edge_index: Any) -> Any:
    """EdgeIndex as the plain tensor it wraps; the rest as it is."""
    return edge_index.as_tensor() if type(edge_index) is not Tensor and hasattr(edge_index, "as_tensor") else edge_index


def _scale_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
