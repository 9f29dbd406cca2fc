"""The PyG layers stretto accelerates. LAYERS is the whole table: importing a file registers nothing by surprise."""

from __future__ import annotations

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
    nn_conv,
    pna,
    relations,
    rgcn,
    sage,
    schnet,
    supergat,
    transformer,
)
from stretto.layers.base import Decline, Record, record_of
from stretto.layers.layer import Layer, stock_of

LAYERS: tuple[Layer, ...] = (
    gcn.LAYER,
    sage.SAGE,
    sage.GRAPH,
    gin.LAYER,
    hops.SG,
    hops.SSG,
    hops.TAG,
    hops.LG,
    hops.APPNP,
    cheb.LAYER,
    gcn2.LAYER,
    arma.LAYER,
    le.LAYER,
    cluster.LAYER,
    mf.LAYER,
    gat.LAYER,
    gatv2.LAYER,
    gate.LAYER,
    transformer.LAYER,
    agnn.LAYER,
    supergat.LAYER,
    rgcn.RGCN,
    rgcn.GROUPED,
    film.LAYER,
    gated.RESIDUAL,
    gated.CRYSTAL,
    gine.LAYER,
    edge_conv.LAYER,
    nn_conv.LAYER,
    gmm.LAYER,
    gen.LAYER,
    pna.LAYER,
    hypergraph.LAYER,
    schnet.LAYER,
    hetero.HAN,
    hetero.HGT,
    relations.LAYER,
    meta.LAYER,
)
CONVS: dict[type, Layer] = {layer.kind: layer for layer in LAYERS}

# What every other layer, a user's own included, aggregates with: the same mechanism, one level further down.
AGGREGATIONS: dict[type, Layer] = {layer.kind: layer for layer in aggr.LAYERS}


def layer_of(kind: type) -> Layer | None:
    """What is known of a class of layers, stock or accelerated; None: it is not in the table."""
    return CONVS.get(stock_of(kind) or kind)


__all__ = ["AGGREGATIONS", "CONVS", "LAYERS", "Decline", "Layer", "Record", "layer_of", "record_of"]
