"""ShaDowKHopSampler: PyG's loader of small subgraphs around each root, without torch-sparse."""

import copy
from typing import Any

import torch
import torch_geometric.loader as pyg
from torch import Tensor
from torch_geometric.data import Batch, Data

from stretto.errors import expect
from stretto.loader import checks
from stretto.loader.native_sampler import MOST_HOPS, NativeSampler, Sampling
from stretto.loader.sampler import NeighborSampler


class ShaDowKHopSampler(pyg.ShaDowKHopSampler):
    """PyG's ShaDowKHopSampler: the subgraph that the sampled neighbourhood of each root induces, one beside the other.

    Nodes of a subgraph come by id and edges by source, as PyG has them. A node that several paths reach is sampled
    once, where torch-sparse samples it once for every path. Random numbers follow torch.manual_seed.
    """

    def __init__(
        self,
        data: Data,
        depth: int,
        num_neighbors: int,
        node_idx: Tensor | None = None,
        replace: bool = False,
        **kwargs: Any,
    ) -> None:
        expect(data.edge_index is not None, "ShaDowKHopSampler: 'data' has no edge_index")
        checks.count("ShaDowKHopSampler", "depth", depth, most=MOST_HOPS)
        self.data = copy.copy(data)
        self.depth, self.num_neighbors, self.replace = depth, num_neighbors, replace
        self.is_sparse_tensor = False
        self.num_nodes, self.num_edges = int(data.num_nodes or 0), int(data.num_edges)
        sampler = NeighborSampler(
            data, [num_neighbors] * depth, subgraph_type="induced", replace=replace, disjoint=True
        )
        self._sampler, self._native = sampler, sampler.native(Sampling.EDGE_ID)
        if node_idx is None:
            node_idx = torch.arange(self.num_nodes)
        elif node_idx.dtype == torch.bool:
            node_idx = node_idx.nonzero(as_tuple=False).view(-1)
        checks.indices("ShaDowKHopSampler", "node_idx", node_idx, self.num_nodes)
        self.node_idx = node_idx
        roots: Any = node_idx.tolist()
        torch.utils.data.DataLoader.__init__(self, roots, collate_fn=self.__collate__, **kwargs)

    def __collate__(self, n_id: Any) -> Batch:
        """The batch of these roots."""
        roots = checks.indices("ShaDowKHopSampler", "n_id", torch.as_tensor(n_id))
        key = int(torch.empty((), dtype=torch.int64).random_())
        slot = self._handle().sample(key, 0, 0, [roots], [None])
        nodes, tree, e_id = slot.n_id(), slot.tree(), slot.edge_id()
        assert tree is not None
        assert e_id is not None
        order = torch.argsort(tree * self.num_nodes + nodes)  # seeds came first; stock has every subgraph by id
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel())
        nodes, tree = nodes[order], tree[order]
        edge_index = place[slot.edge_index()]
        by_source = torch.argsort(edge_index[0] * nodes.numel() + edge_index[1], stable=True)
        e_id = e_id[by_source]
        ptr = torch.zeros(roots.numel() + 1, dtype=torch.int64)
        torch.cumsum(torch.bincount(tree, minlength=roots.numel()), 0, out=ptr[1:])
        batch: Any = Batch()
        batch.batch, batch.ptr = tree, ptr
        batch.root_n_id = place[: roots.numel()]
        batch.edge_index = edge_index[:, by_source]
        for name, value in self.data.items():
            if name in ("edge_index", "adj_t", "num_nodes", "batch", "ptr"):
                continue
            rows = value.size(0) if isinstance(value, Tensor) and value.dim() > 0 else -1
            if name == "y" and rows == self.num_nodes:
                batch[name] = value[nodes][batch.root_n_id]
            elif rows == self.num_nodes:
                batch[name] = value[nodes]
            elif rows == self.num_edges:
                batch[name] = value[e_id]
            else:
                batch[name] = value
        made: Batch = batch
        return made

    def _handle(self) -> NativeSampler:
        if self._native is None:  # this loader went to another process
            self._native = self._sampler.native(Sampling.EDGE_ID)
        return self._native

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_native": None}
