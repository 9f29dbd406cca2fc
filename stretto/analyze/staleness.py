"""The staleness plan: how old rows may be (the setting of stretto.dist), how old they will be, and what it may cost.

Bound. If the stale rows that layer k reads are off by at most d_k (each row's 2-norm), the result is off by at most

    sum over k of c_k d_k,   c_k = r_k |W_k| product over l > k of (a_l |W_l| + o_l |V_l|)

a_l: largest sum of |A_ij| over a row, r_k: the same over remote j only, o_l: weight of a node's own row; |W|: spectral
norm of what multiplies the gathered rows, |V|: of the node's own. Activations between layers must not stretch distances
(relu, tanh, dropout in evaluation). The form is that of VISAGNN's theorem 1, with row sums for its |N(i)| |A_i|.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, GINConv, SAGEConv
from torch_geometric.nn.dense import Linear

from stretto.analyze.graph_stats import Partition
from stretto.dist import Staleness
from stretto.dist.layers import layers_of, why_not
from stretto.layers.layer import stock_of

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

        gathered, self_gain = gain(conv)
        local.append(largest(weight * remote) * float(gathered))
        passed.append(largest(weight) * float(gathered) + own * float(self_gain))
    return tuple(local[k] * float(np.prod(passed[k + 1 :])) for k in range(len(convs)))


def row_weights(conv: Any, edge_index: Tensor, num_nodes: int) -> tuple[np.ndarray, float]:
    """|A_ij| of every edge, and the weight of a node's own row."""
    source, target = (row.numpy() for row in edge_index)
    degree = np.bincount(target, minlength=num_nodes).astype(float)
    if _kind(conv) is not GCNConv:
        mean = conv.aggr == "mean"
        own = abs(1.0 + float(conv.eps.detach())) if _kind(conv) is GINConv else 1.0
        return 1.0 / degree[target] if mean else np.ones(target.size), own
    if not conv.normalize:
        return np.ones(target.size), 0.0
    loops = source == target
    if conv.add_self_loops:
        degree += 1 - np.bincount(target[loops], minlength=num_nodes)
    scale = np.divide(1.0, np.sqrt(degree), out=np.zeros(num_nodes), where=degree > 0)
    weight = scale[source] * scale[target] * (~loops if conv.add_self_loops else 1.0)
    return weight, float((scale**2).max(initial=0.0)) if conv.add_self_loops else 0.0


def gain(conv: Any) -> Any:
    """|W| and |V| of a layer, or a sentence that says why they are not known."""
    kind = _kind(conv)
    if conv.aggr not in ("mean", "sum", "add"):
        return f"{kind.__name__} aggregates by {conv.aggr}, and the bound is that of a sum"
    if kind is GCNConv:
        return _norm(conv.lin.weight), _norm(conv.lin.weight)
    if kind is SAGEConv:
        if conv.normalize or conv.project:
            return "SAGEConv normalises or projects rows, which has no bound here"
        return _norm(conv.lin_l.weight), _norm(conv.lin_r.weight) if conv.root_weight else 0.0
    total = 1.0
    for module in conv.nn.modules():
        if isinstance(module, (nn.Linear, Linear)):
            total *= _norm(module.weight)
        elif not isinstance(module, (nn.Sequential, nn.ReLU, nn.Tanh, nn.Identity, nn.Dropout)):
            return f"the network of GINConv has a {type(module).__name__}"
    return total, total


def _kind(conv: nn.Module) -> type:
    return stock_of(type(conv)) or type(conv)


def _norm(weight: Tensor) -> float:
    return float(torch.linalg.matrix_norm(weight.detach().double(), 2))
