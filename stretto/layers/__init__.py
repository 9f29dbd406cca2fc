"""The PyG layers stretto accelerates. CONVS is the whole table: importing a file registers nothing by surprise.

Each entry is a function fast(layer, *args) that computes what the layer's own forward would, or raises Decline.
"""

from __future__ import annotations

import torch_geometric.nn as pyg
from torch_geometric.nn.models import GAT, GCN, GraphSAGE, MetaLayer
from torch_geometric.nn.models.attentive_fp import GATEConv
from torch_geometric.nn.models.schnet import CFConv

from stretto.layers import (
    aggr,
    agnn,
    arma,
    cheb,
    cluster,
    edge_conv,
    film,
    gat,
    gate,
    gated,
    gatv2,
    gcn,
    gcn2,
    gen,
    gin,
    gine,
    gmm,
    hetero,
    hops,
    hypergraph,
    le,
    meta,
    mf,
    models,
    nn_conv,
    pna,
    relations,
    rgcn,
    sage,
    schnet,
    supergat,
    transformer,
)
from stretto.layers.base import Decline, Fast, Record, record_of
from stretto.layers.static import on_copies

CONVS: dict[type, Fast] = {
    pyg.GCNConv: on_copies(gcn.fast),
    pyg.SAGEConv: on_copies(sage.fast_sage),
    pyg.GraphConv: on_copies(sage.fast_graph),
    pyg.GINConv: gin.fast,
    pyg.SGConv: on_copies(hops.fast_sg),
    pyg.SSGConv: on_copies(hops.fast_ssg),
    pyg.TAGConv: on_copies(hops.fast_tag),
    pyg.LGConv: on_copies(hops.fast_lg),
    pyg.APPNP: on_copies(hops.fast_appnp),
    pyg.ChebConv: on_copies(cheb.fast),
    pyg.GCN2Conv: gcn2.fast,
    pyg.ARMAConv: arma.fast,
    pyg.LEConv: on_copies(le.fast),
    pyg.ClusterGCNConv: on_copies(cluster.fast),
    pyg.MFConv: mf.fast,
    pyg.GATConv: gat.fast,
    pyg.GATv2Conv: gatv2.fast,
    GATEConv: gate.fast,
    pyg.TransformerConv: transformer.fast,
    pyg.AGNNConv: agnn.fast,
    pyg.SuperGATConv: supergat.fast,
    pyg.RGCNConv: rgcn.fast,
    pyg.FastRGCNConv: rgcn.fast_grouped,
    pyg.FiLMConv: film.fast,
    pyg.ResGatedGraphConv: gated.fast_residual,
    pyg.GINEConv: gine.fast,
    pyg.EdgeConv: edge_conv.fast,
    pyg.CGConv: gated.fast_crystal,
    pyg.NNConv: nn_conv.fast,
    pyg.GMMConv: gmm.fast,
    pyg.GENConv: gen.fast,
    pyg.PNAConv: pna.fast,
    pyg.HypergraphConv: hypergraph.fast,
    CFConv: schnet.fast,
    pyg.HANConv: hetero.fast_han,
    pyg.HGTConv: hetero.fast_hgt,
    pyg.HeteroConv: relations.fast,
    MetaLayer: meta.fast,
}

# What every other layer, a user's own included, aggregates with: the same mechanism, one level further down.
AGGREGATIONS: dict[type, Fast] = aggr.AGGREGATIONS

# Models of several layers, on a loader's batch.
CONTAINERS: dict[type, Fast] = {GCN: models.fast_basic, GraphSAGE: models.fast_basic, GAT: models.fast_basic}

__all__ = ["AGGREGATIONS", "CONTAINERS", "CONVS", "Decline", "Record", "record_of"]
