"""The PyG layers stretto accelerates. CONVS is the whole table: importing a file registers nothing by surprise.

Each entry is a function fast(layer, *args) that computes what the layer's own forward would, or raises Decline.
"""

from __future__ import annotations

import torch_geometric.nn as pyg

from stretto.nn import agnn, arma, cheb, cluster, gat, gatv2, gcn, gcn2, gin, hops, le, mf, sage, supergat, transformer
from stretto.nn.base import Decline, Fast, Record, record_of

CONVS: dict[type, Fast] = {
    pyg.GCNConv: gcn.fast,
    pyg.SAGEConv: sage.fast_sage,
    pyg.GraphConv: sage.fast_graph,
    pyg.GINConv: gin.fast,
    pyg.SGConv: hops.fast_sg,
    pyg.SSGConv: hops.fast_ssg,
    pyg.TAGConv: hops.fast_tag,
    pyg.LGConv: hops.fast_lg,
    pyg.APPNP: hops.fast_appnp,
    pyg.ChebConv: cheb.fast,
    pyg.GCN2Conv: gcn2.fast,
    pyg.ARMAConv: arma.fast,
    pyg.LEConv: le.fast,
    pyg.ClusterGCNConv: cluster.fast,
    pyg.MFConv: mf.fast,
    pyg.GATConv: gat.fast,
    pyg.GATv2Conv: gatv2.fast,
    pyg.TransformerConv: transformer.fast,
    pyg.AGNNConv: agnn.fast,
    pyg.SuperGATConv: supergat.fast,
}

__all__ = ["CONVS", "Decline", "Record", "record_of"]
