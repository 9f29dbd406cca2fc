"""Layers on a part, each as a graph op (aggregate the neighbours' rows) and a neural op (what it makes of the sum).

A layer's exact class, stock or accelerated, says in its record how it is split (layers/layer.py): stock classes
aggregate by PyG's own propagate, accelerated ones by stretto's spmm over the part's rows and its halo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.norm import MessageNorm

from stretto.dist.part import Part, Piece
from stretto.errors import expect, fail
from stretto.layers import LAYERS, layer_of
from stretto.layers.layer import Split, stock_of
from stretto.ops import spmm

REDUCES = ("sum", "add", "mean", "max", "min")


def _aggregate(conv: Any, piece: Piece, sources: Tensor, **weights: Tensor) -> Tensor:
    if stock_of(type(conv)) is not None and conv.aggr in REDUCES:
        return spmm(piece.graph, sources, piece.weight, reduce="sum" if conv.aggr == "add" else conv.aggr)
    x = sources if weights else (sources, None)
    out: Tensor = conv.propagate(piece.edge_index, x=x, size=piece.size, **weights)
    return out


# ---- GCN's A: s_i s_j with s = degree^-1/2; the loop it adds to every row is the row's own term ----


@dataclass(frozen=True)
class _Normalised:
    pieces: dict[str, Piece]
    own: Tensor | None  # [n_p] weight of the added loop


def _normalised(conv: Any, part: Part, dtype: torch.dtype) -> _Normalised:
    def make() -> _Normalised:
        edges, degree = part.edge_index, part.degree
        if conv.add_self_loops:  # loops that are there already give way to the added ones, as in stock
            edges, degree = edges[:, edges[0] != edges[1]], degree - part.loops + 1
        scale = degree.to(dtype).pow(-0.5).masked_fill(degree == 0, 0.0)
        weight = scale[edges[0]] * scale[edges[1]] if conv.normalize else torch.ones(edges.size(1), dtype=dtype)
        names = ("interior", "boundary", "all")
        own = scale[: part.own.numel()].square() if conv.add_self_loops else None
        return _Normalised({name: part.cut(name, edges, weight) for name in names}, own)

    return part.cached(("gcn", conv.normalize, conv.add_self_loops, dtype), make)


def split_of(conv: nn.Module) -> Split | None:
    """How a layer, stock or accelerated, runs on a part; None: it does not."""
    layer = layer_of(type(conv))
    return None if layer is None else layer.split


def graph_op(conv: Any, split: Split, part: Part, rows: str, sources: Tensor) -> Tensor:
    """What the rows of this name gather from their sources, [rows, k]."""
    sources = sources if split.sent is None else split.sent(conv, sources)
    if not split.normalised:
        return _aggregate(conv, part.piece(rows), sources)
    piece = _normalised(conv, part, sources.dtype).pieces[rows]
    assert piece.weight is not None
    return _aggregate(conv, piece, sources, edge_weight=piece.weight)


def neural_op(conv: Any, split: Split, part: Part, rows: str, gathered: Tensor, own: Tensor) -> Tensor:
    """What the layer makes of gathered and own rows [rows, k]: [rows, o]."""
    if split.normalised:
        scale, piece = _normalised(conv, part, own.dtype).own, part.piece(rows)
        gathered = gathered if scale is None else gathered + scale[piece.first : piece.last, None] * own
    return split.made(conv, gathered, own)


def why_not(model: nn.Module) -> str:
    """Why a model cannot be split into parts; empty: it can."""
    layers = [module for module in model.modules() if isinstance(module, MessagePassing)]
    if not layers:
        return "it has no layer of message passing"
    for module in layers:
        if split_of(module) is None:
            known = ", ".join(layer.kind.__name__ for layer in LAYERS if layer.split)
            return f"{type(module).__name__} has no rule, only {known} have"
        if module.flow != "source_to_target":
            return f"the flow of {type(module).__name__} is {module.flow}, wanted source_to_target"
    for other in model.modules():
        if _looks_at_other_rows(other):
            return f"{type(other).__name__} would see the rows of one part only"
    return ""


def _looks_at_other_rows(module: nn.Module) -> bool:
    """Whether it is a normalisation over all rows; one over the values of a row has mode "node"."""
    rowwise = isinstance(module, MessageNorm) or getattr(module, "mode", "") == "node"
    ours = type(module).__module__.startswith("torch_geometric.nn.norm")
    return isinstance(module, nn.modules.batchnorm._BatchNorm) or (ours and not rowwise)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers to run by their rules; fails where the model cannot be split."""
    reason = why_not(model)
    if reason:
        fail(f"dist: {type(model).__name__} cannot be split into parts: {reason}")
    return [module for module in model.modules() if split_of(module) is not None]


def check_call(conv: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], edge_index: Tensor) -> None:
    """A layer must be called with the part's own edges and nothing else: weights and sizes have no rule yet. PyG's own
    models pass weights that are None."""
    passed = [value for value in (*args, *kwargs.values()) if value is not None]
    expect(
        len(passed) == 1 and passed[0] is edge_index,
        f"dist: {type(conv).__name__} was called with another edge_index than the part's, or with more arguments",
    )
