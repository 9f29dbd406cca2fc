"""The staleness plan: how old rows may be (the setting of stretto.dist), how old they will be, and what it may cost.

Bound. If the stale rows that layer k reads are off by at most d_k (each row's 2-norm), the result is off by at most

    sum over k of c_k d_k,   c_k = r_k |W_k| product over l > k of (a_l |W_l| + o_l |V_l|)

a_l: largest sum of |A_ij| over a row, r_k: the same over remote j only, o_l: weight of a node's own row; |W|: spectral
norm of what multiplies the gathered rows, |V|: of the node's own. Activations between layers must not stretch distances
(relu, tanh, dropout in evaluation). The form is that of VISAGNN's theorem 1, with row sums for its |N(i)| |A_i|.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stretto.analyze.graph_stats import Partition
from stretto.dist import Staleness
from stretto.dist.layers import layers_of, split_of, why_not
from stretto.layers.layer import Split

FORMULA = "sum_k r_k |W_k| prod_(l>k) (a_l |W_l| + o_l |V_l|) d_k"


@dataclass(frozen=True)
class StalenessPlan:
    """Of one number of workers. Run it with stretto.dist.train(model, data, owner, staleness=plan.setting, ...)."""

    workers: int
    setting: Staleness
    stale_reads: float  # share of the edges whose source is remote
    expected_age: float  # steps, over all edges, once the first steps are past
    amplification: tuple[float, ...]  # c_k of every layer; empty: not known
    reason: str  # why it is not known
    bound: str = FORMULA

    def error(self, drift: list[float]) -> float:
        """The bound for rows that are off by drift[k] in layer k."""
        return float(sum(c * d for c, d in zip(self.amplification, drift, strict=True)))

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "workers": self.workers, "setting": self.setting.to_dict(), "stale reads": self.stale_reads,
            "expected age": self.expected_age, "amplification": list(self.amplification), "reason": self.reason,
            "bound": self.bound,
        }  # fmt: skip


def staleness_plan(
    model: nn.Module, edge_index: Tensor, num_nodes: int, part: Partition, owner: Tensor, *, steps: int = 1
) -> StalenessPlan:
    """The plan for remote rows and gradients up to `steps` steps old."""
    edge_index = edge_index.cpu()
    stale = part.cut / max(1, sum(part.edges))
    factors: tuple[float, ...] = ()
    reason = why_not(model)
    if not reason:
        gains = [gain(conv) for conv in layers_of(model)]
        reason = next((why for why in gains if isinstance(why, str)), "")
    if not reason:
        factors = amplification(layers_of(model), edge_index, num_nodes, owner)
    return StalenessPlan(part.parts, Staleness.halo(steps), stale, stale * steps, factors, reason)


def amplification(convs: list[nn.Module], edge_index: Tensor, num_nodes: int, owner: Tensor) -> tuple[float, ...]:
    """c_k of every layer."""
    local, passed = [], []
    remote = (owner[edge_index[0]] != owner[edge_index[1]]).numpy()
    for conv in convs:
        weight, own = row_weights(conv, edge_index, num_nodes)
        target = edge_index[1].numpy()

        def largest(values: np.ndarray, target: np.ndarray = target) -> float:
            return float(np.bincount(target, values, num_nodes).max(initial=0.0))

        gains = gain(conv)
        assert not isinstance(gains, str)  # whoever asks has looked
        gathered, self_gain = gains
        local.append(largest(weight * remote) * float(gathered))
        passed.append(largest(weight) * float(gathered) + own * float(self_gain))
    return tuple(local[k] * float(np.prod(passed[k + 1 :])) for k in range(len(convs)))


def row_weights(conv: Any, edge_index: Tensor, num_nodes: int) -> tuple[np.ndarray, float]:
    """|A_ij| of every edge, and the weight of a node's own row."""
    source, target = (row.numpy() for row in edge_index)
    degree = np.bincount(target, minlength=num_nodes).astype(float)
    split = _split(conv)
    if not split.normalised:
        own = 1.0 if split.own_weight is None else split.own_weight(conv)
        return 1.0 / degree[target] if conv.aggr == "mean" else np.ones(target.size), own
    if not conv.normalize:
        return np.ones(target.size), 0.0
    loops = source == target
    if conv.add_self_loops:
        degree += 1 - np.bincount(target[loops], minlength=num_nodes)
    scale = np.divide(1.0, np.sqrt(degree), out=np.zeros(num_nodes), where=degree > 0)
    weight = scale[source] * scale[target] * (~loops if conv.add_self_loops else 1.0)
    return weight, float((scale**2).max(initial=0.0)) if conv.add_self_loops else 0.0


def gain(conv: Any) -> tuple[float, float] | str:
    """|W| and |V| of a layer, or a sentence that says why they are not known."""
    if conv.aggr not in ("mean", "sum", "add"):
        return f"{type(conv).__name__} aggregates by {conv.aggr}, and the bound is that of a sum"
    maps = _split(conv).maps
    if maps is None:
        return f"{type(conv).__name__} has no bound here"
    weights = maps(conv)
    if isinstance(weights, str):
        return weights
    gathered, own = weights
    return _norms(gathered), 0.0 if own is None else _norms(own)


def _split(conv: Any) -> Split:
    split = split_of(conv)
    assert split is not None  # of the layers of a model that can be split
    return split


def _norms(weights: Sequence[Tensor]) -> float:
    """The largest factor by which maps one after the other lengthen a row."""
    return math.prod(map(_norm, weights))


def _norm(weight: Tensor) -> float:
    return float(torch.linalg.matrix_norm(weight.detach().double(), 2))
