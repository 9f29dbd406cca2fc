"""NeighborSampler: the native sampler as one of PyG's samplers, with PyG's signature.

Give it to any of PyG's loaders (`NeighborLoader(..., neighbor_sampler=...)`, `NodeLoader(node_sampler=...)`). Random
numbers are keyed by one draw from torch's default generator per call, so torch.manual_seed reproduces them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import (
    BaseSampler,
    EdgeSamplerInput,
    HeteroSamplerOutput,
    NegativeSampling,
    NodeSamplerInput,
    SamplerOutput,
)
from torch_geometric.sampler.base import DataType, NumNeighbors, SubgraphType
from torch_geometric.sampler.neighbor_sampler import edge_sample, node_sample

from stretto.errors import expect, fail
from stretto.loader import arrays
from stretto.loader.native_sampler import MOST_REPLACED, NativeSampler, NodeType, Relation, Sampling, Slice
from stretto.loader.slot import Slot
from stretto.loader.store import Store

METHODS = ("uniform", "labor")
SEMANTICS = ("frontier", "layered")


class NeighborSampler(BaseSampler):
    """Samples neighbours in a Data, HeteroData, (FeatureStore, GraphStore) or Store.

    Beyond PyG's arguments: method="labor" lets all targets of a hop share one random number per source, so that a batch
    needs fewer nodes; layer_dependency=True shares it between hops too; semantics="layered" samples at every hop all
    nodes known so far, as SALIENT does, and not only the new ones; e_id=False leaves edge ids out.
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: NumNeighbors | Sequence[int] | Mapping[Any, Sequence[int]],
        subgraph_type: SubgraphType | str = "directional",
        replace: bool = False,
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        is_sorted: bool = False,
        share_memory: bool = False,
        directed: bool = True,
        *,
        method: str = "uniform",
        semantics: str = "frontier",
        layer_dependency: bool = False,
        e_id: bool = True,
    ) -> None:
        if isinstance(data, Store):
            self.graph = data.read(time_attr=time_attr, weight_attr=weight_attr)
            self.data_type = DataType.heterogeneous if self.graph.hetero else DataType.homogeneous
        else:
            self.data_type = DataType.from_data(data)
            self.graph = arrays.read(data, time_attr=time_attr, weight_attr=weight_attr, is_sorted=is_sorted)
        self.subgraph_type = SubgraphType(subgraph_type) if directed else SubgraphType.induced
        expect(
            temporal_strategy in ("uniform", "last"),
            f"NeighborSampler: 'temporal_strategy' is {temporal_strategy!r}, wanted 'uniform' or 'last'",
        )
        expect(method in METHODS, f"NeighborSampler: 'method' is {method!r}, wanted one of {', '.join(METHODS)}")
        expect(
            semantics in SEMANTICS,
            f"NeighborSampler: 'semantics' is {semantics!r}, wanted one of {', '.join(SEMANTICS)}",
        )
        last = temporal_strategy == "last" and self.graph.temporal
        if weight_attr is not None and (last or method == "labor"):
            fail("NeighborSampler: 'weight_attr' goes with uniform sampling only, not with 'last' or 'labor'")
        if method == "labor" and (replace or last):
            fail("NeighborSampler: method='labor' neither draws with replacement nor takes the last edges")
        if semantics == "layered" and self.subgraph_type != SubgraphType.directional:
            fail(f"NeighborSampler: semantics='layered' gives directional subgraphs, not {self.subgraph_type.value}")
        self.replace, self.temporal_strategy, self.method, self.semantics = (
            replace,
            temporal_strategy,
            method,
            semantics,
        )
        self.num_neighbors, self.time_attr = num_neighbors, time_attr
        self.layer_dependency, self.e_id = layer_dependency, e_id
        self._disjoint = disjoint
        self.keep_orig_edges = False
        self._native: NativeSampler | None = None

    # ---- what PyG reads of a sampler ----

    @property
    def num_neighbors(self) -> NumNeighbors:
        return self._num_neighbors

    @num_neighbors.setter
    def num_neighbors(self, value: NumNeighbors | Sequence[int] | Mapping[Any, Sequence[int]]) -> None:
        plain: Any = value if isinstance(value, (NumNeighbors, Mapping)) else list(value)
        self._num_neighbors = plain if isinstance(plain, NumNeighbors) else NumNeighbors(plain)
        self.fanouts = self._fanouts()
        self._native = None

    @property
    def disjoint(self) -> bool:
        return self._disjoint or self.graph.temporal

    @disjoint.setter
    def disjoint(self, value: bool) -> None:
        self._disjoint = value
        self._native = None

    @property
    def is_hetero(self) -> bool:
        return self.graph.hetero

    @property
    def is_temporal(self) -> bool:
        return self.graph.temporal

    @property
    def num_nodes(self) -> int | dict[str, int]:
        return self.graph.num_nodes if self.is_hetero else self.graph.num_nodes[None]

    @property
    def node_time(self) -> Tensor | dict[str, Tensor] | None:
        if not self.graph.node_time:
            return None
        return self.graph.node_time if self.is_hetero else self.graph.node_time[None]

    @property
    def edge_permutation(self) -> None:
        """Nothing: the ids of sampled edges are the user's already."""
        return

    # ---- sampling ----

    def sample_from_nodes(self, index: NodeSamplerInput, **kwargs: Any) -> SamplerOutput | HeteroSamplerOutput:
        output: SamplerOutput | HeteroSamplerOutput = self.finish(node_sample(index, self._sample))
        return output

    def sample_from_edges(
        self, index: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None
    ) -> SamplerOutput | HeteroSamplerOutput:
        output: SamplerOutput | HeteroSamplerOutput = self.finish(self.edge_sample(index, self._sample, neg_sampling))
        return output

    def edge_sample(
        self, index: EdgeSamplerInput, sample: Callable[..., Any], neg_sampling: NegativeSampling | None
    ) -> Any:
        """PyG's own preparation of link batches (negatives, labels, times), around any function that samples."""
        return edge_sample(index, sample, self.num_nodes, self.disjoint, self.node_time, neg_sampling)

    def finish(self, out: Any) -> Any:
        """What remains after sampling: both directions of every edge where asked for."""
        if self.subgraph_type == SubgraphType.bidirectional:
            return out.to_bidirectional(keep_orig_edges=self.keep_orig_edges)
        return out

    def _sample(self, seed: Any, seed_time: Any = None, **kwargs: Any) -> SamplerOutput | HeteroSamplerOutput:
        if self._native is None:
            self._native = self.native(Sampling.EDGE_ID if self.e_id else Sampling(0))
        key = int(torch.empty((), dtype=torch.int64).random_())
        return self.output(self._native.sample(key, 0, 0, *self.by_type(seed, seed_time)))

    def by_type(self, seed: Any, seed_time: Any = None) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Seeds and their times, one entry per node type."""
        if not self.is_hetero:
            return [seed], [seed_time]
        times = seed_time or {}
        return [seed.get(t) for t in self.graph.node_types], [times.get(t) for t in self.graph.node_types]

    def output(self, slot: Slot) -> SamplerOutput | HeteroSamplerOutput:
        """A slot in PyG's words."""
        counted = self.subgraph_type != SubgraphType.induced
        if not self.is_hetero:
            row, col = slot.edge_index()
            return SamplerOutput(
                node=slot.n_id(),
                row=row,
                col=col,
                edge=slot.edge_id(),
                batch=slot.tree(),
                num_sampled_nodes=slot.nodes_per_hop() if counted else None,
                num_sampled_edges=slot.edges_per_hop() if counted else None,
            )
        trees: Any = {t: slot.tree(i) for i, t in enumerate(self.graph.node_types)} if self.disjoint else None
        node_types, edge_types = list(enumerate(self.graph.node_types)), list(enumerate(self.graph.edge_types))
        edge_index = {t: slot.edge_index(r) for r, t in edge_types}
        return HeteroSamplerOutput(
            node={t: slot.n_id(i) for i, t in node_types},
            row={t: e[0] for t, e in edge_index.items()},
            col={t: e[1] for t, e in edge_index.items()},
            edge={t: slot.edge_id(r) for r, t in edge_types},
            batch=trees,
            num_sampled_nodes={t: slot.nodes_per_hop(i) for i, t in node_types} if counted else None,
            num_sampled_edges={t: slot.edges_per_hop(r) for r, t in edge_types} if counted else None,
        )

    # ---- the native side ----

    def native(self, extra: Sampling, slices: Sequence[Slice] = ()) -> NativeSampler:
        """A native sampler with this one's settings."""
        graph = self.graph
        flags = extra
        for wanted, flag in (
            (self.replace, Sampling.REPLACE),
            (self.disjoint, Sampling.DISJOINT),
            (self.semantics == "layered", Sampling.LAYERED),
            (self.temporal_strategy == "last" and graph.temporal, Sampling.LAST),
            (self.subgraph_type == SubgraphType.induced, Sampling.INDUCED),
            (self.method == "labor", Sampling.LABOR),
            (self.layer_dependency, Sampling.SHARED),
        ):
            flags |= flag if wanted else Sampling(0)
        if self.semantics == "layered":
            flags &= ~Sampling.CSR  # a target has edges of several hops there
        node_types = [NodeType(graph.num_nodes[t], graph.node_time.get(t)) for t in graph.node_types]
        relations = []
        for edge_type in graph.edge_types:
            e = graph.edges[edge_type]
            source, target = graph.ends(edge_type)
            relations.append(
                Relation(e.colptr, e.row, self.fanouts[edge_type], source, target, e.edge_id, e.time, e.running)
            )
        return NativeSampler(node_types, relations, self.num_hops, flags, slices)

    @property
    def num_hops(self) -> int:
        return max((len(f) for f in self.fanouts.values()), default=0)

    def _fanouts(self) -> dict[Any, list[int]]:
        values: Any
        if self.is_hetero:
            values = self._num_neighbors.get_values(self.graph.edge_types)
        else:
            values = {None: self._num_neighbors.get_values()}
            expect(
                not isinstance(values[None], dict),
                "NeighborLoader: 'num_neighbors' is a dict, but the graph has one edge type",
            )
        out = {}
        for edge_type, fanout in values.items():
            for k in fanout:
                if not isinstance(k, int) or k < -1:
                    fail(f"NeighborLoader: 'num_neighbors' holds {k!r}, wanted integers >= 0, or -1 for all")
                if self.replace and k > MOST_REPLACED:
                    fail(f"NeighborLoader: 'num_neighbors' holds {k}, wanted at most {MOST_REPLACED} with 'replace'")
            out[edge_type] = list(fanout)
        return out

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_native": None}  # a handle means nothing in another process
