"""What each layer of a model needs of a batch, so that it computes nothing that is thrown away.

`layers(batch)` lists, from the first layer to the last, the edges a layer uses and how many sources and targets they
have. A bipartite conv then takes `conv((x, x[:num_targets]), edge_index)`. Graph.of knows every one of these edge
indices. (PyG's own trim_to_layer works on the batches too; it keeps each layer's graph square.)
"""

from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from stretto.errors import expect
from stretto.graph import Graph


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
    whole = Graph.of(batch.edge_index, known[-1]) if semantics == "frontier" else None
    out = []
    for hop in reversed(range(len(edges))):
        size = (known[hop + 1], known[hop])
        start = 0 if semantics == "frontier" else sampled[hop]
        edge_index = batch.edge_index[:, start : sampled[hop + 1]]
        if whole is not None and whole.csr.edge_id is None and whole.csr.col is not None:
            rowptr, col = whole.csr.rowptr[: size[1] + 1], whole.csr.col[: sampled[hop + 1]]
            Graph.remember(edge_index, Graph.of_pointers(rowptr, col, size[0]), size)
        out.append(Layer(edge_index, size, (start, sampled[hop + 1])))
    return out


def trimmed(batch: Any, *, semantics: str = "frontier") -> Any:
    """The batch with its `layers`."""
    batch.layers = layers(batch, semantics=semantics)
    return batch
