"""From PyG's containers to the sampler's arrays: one CSC per edge type, sorted by time where there is one.

Reads Data, HeteroData and (FeatureStore, GraphStore). Homogeneous graphs are the case of one node and one edge type,
whose names are None. Loaders of one edge_index (training, validation, every call of inference) share what was sorted.
"""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData, remote_backend_utils
from torch_geometric.sampler.utils import to_csc

from stretto.errors import expect, fail
from stretto.graph import formats
from stretto.kernels import build
from stretto.kernels.looks import look
from stretto.lifetime import popped_from
from stretto.loader import checks
from stretto.loader.native_sampler import running_weights

WHO = "NeighborLoader"


@dataclass
class EdgeArrays:
    """One edge type. colptr [targets + 1] int64; row, edge_id, time, running [edges] in CSC order."""

    colptr: Tensor
    row: Tensor
    edge_id: Tensor | None = None  # None: CSC order is the user's order
    time: Tensor | None = None
    running: Tensor | None = None


@dataclass
class GraphArrays:
    """What the sampler reads of a graph. Node and edge types are in a fixed order; (None,) means homogeneous."""

    node_types: list[Any]
    edge_types: list[Any]
    num_nodes: dict[Any, int]
    edges: dict[Any, EdgeArrays]
    node_time: dict[Any, Tensor] = field(default_factory=dict)
    temporal: bool = False

    def __post_init__(self) -> None:
        self.hetero = self.node_types != [None]

    def ends(self, edge_type: Any) -> tuple[int, int]:
        """Numbers of the source and target node type."""
        if edge_type is None:
            return 0, 0
        return self.node_types.index(edge_type[0]), self.node_types.index(edge_type[2])


def read(
    data: Any, *, time_attr: str | None = None, weight_attr: str | None = None, is_sorted: bool = False
) -> GraphArrays:
    """The arrays of a Data, HeteroData or (FeatureStore, GraphStore)."""
    if isinstance(data, Data):
        return _read_homogeneous(data, time_attr, weight_attr, is_sorted)
    if isinstance(data, HeteroData):
        return _read_heterogeneous(data, time_attr, weight_attr, is_sorted)
    if isinstance(data, (tuple, list)) and len(data) == 2 and isinstance(data[1], GraphStore):
        expect(
            weight_attr is None,
            "NeighborLoader: 'weight_attr' is set, but a (FeatureStore, GraphStore) has no weights to read",
        )
        return _read_stores(data[0], data[1], time_attr)
    fail(f"NeighborLoader: 'data' is {type(data).__name__}, wanted Data, HeteroData or (FeatureStore, GraphStore)")


def _read_homogeneous(data: Data, time_attr: str | None, weight_attr: str | None, is_sorted: bool) -> GraphArrays:
    num_nodes = int(data.num_nodes or 0)
    node_time = edge_time = None
    if time_attr is not None:
        if time_attr in data and data.is_node_attr(time_attr):
            node_time = as_times(data[time_attr], time_attr, num_nodes)
        elif time_attr in data and data.is_edge_attr(time_attr):
            edge_time = as_times(data[time_attr], time_attr)
        else:
            fail(f"NeighborLoader: 'time_attr' is {time_attr!r}, which is neither a node- nor an edge-level attribute")
    weight = _attribute(data, weight_attr, "weight_attr")
    arrays = _compress(data, num_nodes, num_nodes, node_time, edge_time, weight, is_sorted)
    out = GraphArrays([None], [None], {None: num_nodes}, {None: arrays}, temporal=time_attr is not None)
    if node_time is not None:
        out.node_time[None] = node_time
    return out


def _read_heterogeneous(
    data: HeteroData, time_attr: str | None, weight_attr: str | None, is_sorted: bool
) -> GraphArrays:
    node_types, edge_types = data.metadata()
    num_nodes = {t: int(data[t].num_nodes or 0) for t in node_types}
    kinds: list[Any] = [*node_types, *edge_types]
    timed = [t for t in kinds if time_attr is not None and time_attr in data[t]]
    node_time = {t: as_times(data[t][time_attr], time_attr, num_nodes[t]) for t in timed if t in num_nodes}
    edge_time = {t: as_times(data[t][time_attr], time_attr) for t in timed if t not in num_nodes}
    if time_attr is not None and bool(node_time) == bool(edge_time):
        have = "both node- and edge-level" if node_time else "neither a node- nor an edge-level attribute"
        fail(f"NeighborLoader: 'time_attr' is {time_attr!r}, which is {have}")
    edges = {}
    for edge_type in edge_types:
        source, _, target = edge_type
        weight = None
        if weight_attr is not None and weight_attr in data[edge_type]:
            weight = _attribute(data[edge_type], weight_attr, "weight_attr")
        edges[edge_type] = _compress(
            data[edge_type],
            num_nodes[source],
            num_nodes[target],
            node_time.get(source),
            edge_time.get(edge_type),
            weight,
            is_sorted,
        )
    if weight_attr is not None:
        expect(any(e.running is not None for e in edges.values()), f"NeighborLoader: no edge type has {weight_attr!r}")
    return GraphArrays(list(node_types), list(edge_types), num_nodes, edges, node_time, time_attr is not None)


def _compress(
    store: Any,
    num_sources: int,
    num_targets: int,
    node_time: Tensor | None,
    edge_time: Tensor | None,
    weight: Tensor | None,
    is_sorted: bool,
) -> EdgeArrays:
    """One edge type's CSC: by target, within a target by time, otherwise in the user's order."""
    edge_index = getattr(store, "edge_index", None)
    adjacency = getattr(store, "adj_t", None)
    if edge_index is None:
        if isinstance(adjacency, Tensor):
            matrix = by_target(adjacency, num_sources, num_targets)
            colptr, row, perm = matrix.crow_indices(), matrix.col_indices(), None
        else:
            colptr, row, perm = to_csc(
                store, device=torch.device("cpu"), is_sorted=is_sorted
            )  # adj or adj_t, or no edges at all
        colptr, row = own(WHO, colptr, row, num_sources, num_targets)
        if node_time is not None or edge_time is not None:
            expect(is_sorted, "NeighborLoader: temporal sampling of 'adj_t' needs 'is_sorted=True': its edges by time")
        _one_each("time_attr", edge_time, row.numel())
    else:
        if node_time is None and edge_time is None and weight is None:
            return _remembered(edge_index, num_sources, num_targets)
        edge_index = formats.plain(edge_index)
        source, target = checks.edges(WHO, "edge_index", edge_index, num_sources, num_targets)
        _one_each("time_attr", edge_time, source.numel())
        by_time = None
        if (node_time is not None or edge_time is not None) and not is_sorted:
            at = edge_time if edge_time is not None else _of_sources(node_time, source)
            by_time = torch.argsort(at, stable=True)
            source, target = source[by_time], target[by_time]
        colptr, row, perm = _sorted(source, target, num_sources, num_targets)
        if by_time is not None:
            perm = by_time if perm is None else by_time[perm.long()]
    out = EdgeArrays(colptr.contiguous(), row.contiguous(), None if perm is None else perm.contiguous())
    if edge_time is not None:
        out.time = _in_order(edge_time, perm)
    elif node_time is not None:
        out.time = _of_sources(node_time, row)
    if weight is not None:
        _one_each("weight_attr", weight, row.numel())
        out.running = running_weights(out.colptr, _in_order(weight.detach().cpu().reshape(-1), perm))
    return out


def _one_each(argument: str, values: Tensor | None, num_edges: int) -> None:
    if values is not None and values.numel() != num_edges:
        fail(f"{WHO}: '{argument}' has {values.numel()} values, wanted {num_edges}, one per edge")


def by_target(adjacency: Tensor, num_sources: int, num_targets: int) -> Tensor:
    """A torch.sparse adj_t [targets, sources] as CSR on the CPU, once its indices are known to be in range.

    torch itself turns one layout into another without looking.
    """
    if adjacency.shape[:2] != (num_targets, num_sources) or adjacency.is_meta:
        fail(
            f"{WHO}: 'adj_t' is {checks.shape_of(adjacency)}, wanted a sparse tensor of shape "
            f"[{num_targets}, {num_sources}], targets x sources"
        )
    matrix = adjacency.detach().cpu()
    if matrix.layout == torch.sparse_coo:
        target, source = _indices(matrix)
        checks.indices(WHO, "adj_t", target, num_targets, of="target")
        checks.indices(WHO, "adj_t", source, num_sources, of="source")
        matrix = matrix.to_sparse_csr()
    elif matrix.layout == torch.sparse_csc:
        pointers, target = _indices(matrix)
        checks.indices(WHO, "adj_t", target, num_targets, of="target")
        checks.pointers(WHO, "adj_t", pointers, num_sources, target.numel())
        matrix = matrix.to_sparse_csr()
    elif matrix.layout == torch.sparse_csr:
        pointers, source = _indices(matrix)
        checks.indices(WHO, "adj_t", source, num_sources, of="source")
        checks.pointers(WHO, "adj_t", pointers, num_targets, source.numel())
    else:
        fail(f"{WHO}: 'adj_t' is {checks.shape_of(adjacency)}, wanted a sparse tensor in COO, CSR or CSC")
    return matrix


def _indices(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The two tensors of indices in a sparse one: the pointers first, or the rows."""
    try:
        if matrix.layout == torch.sparse_coo:
            rows, cols = matrix._indices()[:2]
            return rows, cols
        if matrix.layout == torch.sparse_csc:
            return matrix.ccol_indices(), matrix.row_indices()
        return matrix.crow_indices(), matrix.col_indices()
    except RuntimeError as error:  # made of indices that are no dense tensor, which torch found out only now
        fail(f"{WHO}: the indices of 'adj_t' cannot be read: {error}")


def own(who: str, colptr: Tensor, row: Tensor, num_sources: int, num_targets: int) -> tuple[Tensor, Tensor]:
    """Checked copies of a user's colptr and row in our types: what is edited in them later reaches no native thread."""
    for name, array in (("colptr", colptr), ("row", row)):
        if not isinstance(array, Tensor) or array.dtype not in checks.INDEX:
            fail(f"{who}: '{name}' is {checks.shape_of(array)}, wanted int64 or int32 of shape [n]")
        checks.indices(who, name, array)
    row = row.detach().cpu()
    checks.in_range(who, "row", row, num_sources, of="source")  # before it is made narrower
    row = row.to(torch.int32 if num_sources < 2**31 else torch.int64, copy=True).contiguous()
    colptr = colptr.detach().to("cpu", torch.int64, copy=True).contiguous()
    checks.pointers(who, "colptr", colptr, num_targets, row.numel())
    return colptr, row


def _sorted(source: Tensor, target: Tensor, num_sources: int, num_targets: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """colptr, row and the permutation (None: in order already)."""
    dtype = torch.int32 if max(num_sources, num_targets, source.numel()) < 2**31 else torch.int64
    colptr, row, perm = build.compress(target, source, num_targets, dtype)
    assert row is not None
    return colptr, row.to(torch.int32) if num_sources < 2**31 else row, perm


# id of an edge_index -> itself, what it looked like, its sizes, and what was sorted for them. Gone with the edge_index.
_known: dict[int, tuple[weakref.ref[Tensor], tuple[Any, ...], EdgeArrays]] = {}


def _remembered(edge_index: Tensor, num_sources: int, num_targets: int) -> EdgeArrays:
    """The CSC of an edge_index without times and weights, sorted once."""
    edge_index = formats.plain(edge_index)
    now = look(edge_index) if isinstance(edge_index, Tensor) else None
    state = None if now is None else (now, num_sources, num_targets)
    known = _known.get(id(edge_index))
    if state is not None and known is not None and known[0]() is edge_index and known[1] == state:
        return known[2]
    source, target = checks.edges(WHO, "edge_index", edge_index, num_sources, num_targets)
    colptr, row, perm = _sorted(source, target, num_sources, num_targets)
    out = EdgeArrays(colptr, row, perm)
    if state is not None:
        _known[id(edge_index)] = popped_from(_known, id(edge_index), edge_index), state, out
    return out


def forget() -> None:
    """Have the next loader sort its edges anew."""
    _known.clear()


def _in_order(values: Tensor, perm: Tensor | None) -> Tensor:
    return values.contiguous() if perm is None else values.index_select(0, perm)


def _of_sources(node_time: Tensor | None, source: Tensor) -> Tensor:
    assert node_time is not None
    return node_time[source.long()].contiguous()


def _attribute(store: Any, name: str | None, argument: str) -> Tensor | None:
    if name is None:
        return None
    value = getattr(store, name, None)
    if not isinstance(value, Tensor):
        fail(f"NeighborLoader: '{argument}' is {name!r}, which 'data' does not have")
    return checks.real(WHO, argument, value)


def as_times(value: Any, name: str | None, num_nodes: int | None = None) -> Tensor:
    """Times as int64 on the CPU, one for each node where these are of nodes. Fractions would be lost: refused."""
    if not checks.is_dense(value) or value.dtype not in checks.INTEGERS:
        fail(f"{WHO}: time attribute {name!r} is {checks.shape_of(value)}, wanted integers")
    if num_nodes is not None and value.numel() != num_nodes:
        fail(f"{WHO}: time attribute {name!r} has {value.numel()} times, wanted {num_nodes}, one for each node")
    times: Tensor = value.detach().cpu().to(torch.int64).contiguous().view(-1)
    return times


def _read_stores(feature_store: FeatureStore, graph_store: GraphStore, time_attr: str | None) -> GraphArrays:
    edge_attrs = graph_store.get_all_edge_attrs()
    hetero = {attr.edge_type for attr in edge_attrs} != {None}
    times = {} if time_attr is None else _stored_times(feature_store, edge_attrs, time_attr)
    for attr in edge_attrs:
        _check_stored(graph_store, attr)  # PyG turns one layout into another without looking
    csc: Any = graph_store.csc()
    rows, colptrs, perms = csc if hetero else ({None: part} for part in csc)
    num_nodes = _stored_nodes(feature_store, graph_store, rows)
    edge_types: list[Any] = sorted(rows) if hetero else [None]
    # For a homogeneous store PyG tells node from edge times by the attribute's name.
    by_edge = any(isinstance(key, tuple) for key in times) or (not hetero and time_attr not in (None, "time"))
    edges = {}
    for edge_type in edge_types:
        source, target = (edge_type[0], edge_type[2]) if hetero else (None, None)
        perm = perms.get(edge_type)
        colptr, row = own(WHO, colptrs[edge_type], rows[edge_type], num_nodes[source], num_nodes[target])
        order: Tensor | None = None if perm is None else perm.cpu().contiguous()
        arrays = EdgeArrays(colptr, row, order)
        at = times.get(edge_type if by_edge else source)
        if at is not None:
            wanted = row.numel() if by_edge else num_nodes[source]
            expect(at.numel() == wanted, f"{WHO}: {time_attr!r} has {at.numel()} times, wanted {wanted}")
            ordered = at if order is None or not by_edge else at[order]
            arrays.time = ordered if by_edge else _of_sources(at, row)
        edges[edge_type] = arrays
    node_time = {} if by_edge else times
    return GraphArrays(list(num_nodes), edge_types, num_nodes, edges, node_time, time_attr is not None)


def _stored_nodes(feature_store: FeatureStore, graph_store: GraphStore, edge_types: Any) -> dict[Any, int]:
    """How many nodes of each type there are: of those that edges name, and of those that features name alone."""
    if None in edge_types:
        return {None: max(graph_store.get_all_edge_attrs()[0].size or (0, 0))}
    names = {a.group_name for a in feature_store.get_all_tensor_attrs() if isinstance(a.group_name, str)}
    names |= {end for edge_type in edge_types for end in (edge_type[0], edge_type[2])}
    return {t: remote_backend_utils.num_nodes(feature_store, graph_store, t) for t in sorted(names)}


def _stored_times(feature_store: FeatureStore, edge_attrs: Any, time_attr: str) -> dict[Any, Tensor]:
    """The times in a FeatureStore, by node or edge type."""
    for attr in edge_attrs:
        expect(
            attr.is_sorted and attr.layout.value != "csr",
            "NeighborLoader: temporal sampling needs edges sorted by destination, and by time within each",
        )
    times: dict[Any, Tensor] = {}
    for tensor in feature_store.get_all_tensor_attrs():
        if tensor.attr_name == time_attr:
            tensor.index = None
            times[tensor.group_name] = as_times(feature_store.get_tensor(tensor), time_attr)
    expect(bool(times), f"NeighborLoader: no tensor named {time_attr!r} in the feature store")
    return times


def _check_stored(graph_store: GraphStore, attr: Any) -> None:
    """The edges of one type in a GraphStore, in the layout they are stored in."""
    stored: Any = graph_store.get_edge_index(attr)
    name = f"edge_index of {attr.edge_type}"
    row, col = (checks.indices(WHO, name, index) for index in stored)
    # PyG numbers the nodes of its LocalGraphStore, which has a `meta`, without regard to their type.
    rows, cols = attr.size if attr.size is not None and not hasattr(graph_store, "meta") else (None, None)
    for end, index, size in (("source", row, rows), ("target", col, cols)):
        if attr.layout.value == ("csr" if end == "source" else "csc"):
            other = col if end == "source" else row
            checks.pointers(WHO, name, index, max(index.numel() - 1, 0) if size is None else size, other.numel())
        else:
            checks.in_range(WHO, name, index, 2**62 if size is None else size, of=end)
