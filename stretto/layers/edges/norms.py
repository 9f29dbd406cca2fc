"""A BatchNorm in training inside a network on edges, with edges in blocks.

Its mean and variance are of all edges, so each takes a pass of its own over the blocks; those that follow find them as
they find weights. Gradients flow through them, and backward takes the same passes again. A Dropout drops the same in
all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn.models import MLP
from torch_geometric.nn.norm import BatchNorm

from stretto.graph import Graph
from stretto.kernels import accumulate_type
from stretto.layers.base import hooked
from stretto.layers.edges import streaming
from stretto.ops.edge_mlp import Ends, edge_mlp, listed
from stretto.ops.replay import mixed

# How many times streaming.LARGE an array may be before one BatchNorm, or more, take passes over blocks. At once such a
# network takes half of stock's time; in passes as long as stock with one, 1.8 times as long with two.
PATIENCE, SEVERAL = 4, 16
FEW = 1 << 10  # edges whose mean is what deviations are taken from: squares of the values themselves would cancel

# BatchNorms whose statistics are known and Dropouts of a block, and what they do to rows.
Known = dict[Any, Callable[[Tensor], Tensor]]
Stage = Callable[[Any, Known], Callable[..., Tensor]]


def in_order(network: Any) -> list[Any]:
    """The modules of a Sequential or an MLP, one after the other."""
    if type(network) is nn.Sequential:
        return [inner for module in network for inner in in_order(module)]
    if type(network) is not MLP:
        return [network]
    result: list[Any] = []
    for at, linear in enumerate(network.lins):
        result.append(linear)
        if at < len(network.norms):
            acts = [] if network.act is None else [network.act]
            result += [*acts, network.norms[at]] if network.act_first else [network.norms[at], *acts]
        if network.dropout[at] > 0:
            result.append(nn.Dropout(network.dropout[at]).train(network.training))
    return result


def watched(network: Any) -> bool:
    """Whether somebody watches the calls of a network, or of a Sequential or an MLP inside it."""
    inner = list(network) if type(network) is nn.Sequential else []
    return type(network) in (nn.Sequential, MLP) and (hooked(network) or any(map(watched, inner)))


def sees_all(module: Any) -> Any:
    """The BatchNorm1d that a module is, or wraps, if it takes its statistics of what it is given; else None."""
    norm = module.module if type(module) is BatchNorm else module
    if type(norm) is not nn.BatchNorm1d:
        return None
    return norm if norm.training or norm.running_mean is None else None


def takes(graph: Graph, modules: Sequence[Any], width: int, like: Tensor) -> bool:
    """Whether modules among which a BatchNorm sees all edges are to have them in blocks, and can: the others go row by
    row. width: of the widest array an edge.
    """
    norms = [module for module in modules if sees_all(module) is not None]
    if not streaming.large(graph, width, like, PATIENCE if len(norms) == 1 else SEVERAL) or graph.num_edges < 2:
        return False
    if not norms or len(set(norms)) < len(norms) or hooked(*norms, *map(sees_all, norms)):
        return False
    return streaming.row_by_row((module for module in modules if sees_all(module) is None), random=True)


def run(modules: Sequence[Any], x: Tensor, until: Any, known: Known) -> Tensor:
    """The modules one after the other up to the input of `until`, if it is there; those that are known as they are."""
    for module in modules:
        if module is until:
            break
        x = known.get(module, module)(x)
    return x


def with_statistics(
    graph: Graph, stage: Stage, modules: Sequence[Any], learned: Sequence[Tensor], row: Ends, col: Ends, edge: Ends
) -> tuple[Callable[..., Tensor], Ends, list[Tensor]]:
    """The network on edges as a function of blocks of them, what it reads of edges, and the statistics that it is to be
    handed last.

    stage(until, known): the network as a function of (row_i, col_j, edge), up to the input of `until`. modules: those
    of the network, in order. learned: what its blocks have gradients for. Running statistics move on, as in a call.
    """
    dropped = {module: module.p for module in modules if type(module) is nn.Dropout and module.training}
    seed = int(torch.randint(2**63 - 1, (), device="cpu")) if dropped else 0
    if dropped:  # by its first edge a block knows itself
        edge = [*listed(edge), torch.arange(graph.num_edges, device=graph.device)]

    def bound(until: Any, norms: tuple[tuple[Any, Tensor | None], ...]) -> Callable[..., Tensor]:
        """stage(until, ...) as a function of ends and of mean and scale of each of the norms."""

        def function(*inputs: Any) -> Tensor:
            count = len(inputs) - 2 * len(norms)
            pairs = zip(norms, inputs[count::2], inputs[count + 1 :: 2], strict=True)
            known: Known = {norm: functools.partial(_normed, mean, scale, bias) for (norm, bias), mean, scale in pairs}
            if dropped:
                count -= 1
                generator = _generator(seed, inputs[count])
                known |= {module: functools.partial(_drop, generator, p) for module, p in dropped.items()}
            return stage(until, known)(*inputs[:count])

        return streaming.as_now(function, modules)

    norms: list[tuple[Any, Tensor | None]] = []  # each with its bias: by the time of backward it may be in eval mode
    result: list[Tensor] = []
    for module in modules:
        norm = sees_all(module)
        if norm is not None:
            mean, var = _moments(graph, bound(module, tuple(norms)), learned, result, row, col, edge)
            _move_on(norm, mean, var, graph.num_edges)
            scale = (var + norm.eps).rsqrt()
            result = [*result, mean, scale if norm.weight is None else scale * norm.weight]
            norms.append((module, norm.bias))
    return bound(None, tuple(norms)), edge, result


def _generator(seed: int, edges: Tensor) -> torch.Generator:
    """Random numbers of one block. Every pass runs the same modules in the same order, as far as it goes, so that each
    Dropout finds what it found in the pass before. edges [B]: their numbers."""
    first = int(edges[0]) if edges.numel() else 0
    return torch.Generator(edges.device).manual_seed(mixed(seed ^ mixed(first)))


def _drop(generator: torch.Generator, p: float, x: Tensor) -> Tensor:
    """What a Dropout makes of rows. [B, k] -> [B, k]."""
    if p == 1:
        return x * 0
    return x * torch.empty_like(x).bernoulli_(1 - p, generator=generator).div_(1 - p)


def _moments(
    graph: Graph,
    function: Callable[..., Tensor],
    learned: Sequence[Tensor],
    shared: Sequence[Tensor],
    row: Ends,
    col: Ends,
    edge: Ends,
) -> tuple[Tensor, Tensor]:
    """Mean and variance over all edges of function(row_i, col_j, edge, *shared). -> [k] each, in the type of sums."""
    csr = graph.edge_csr
    count = min(graph.num_edges, FEW)
    some = torch.arange(count, device=csr.device) * (graph.num_edges - 1) // (count - 1)  # of all rows, two or more
    places = (
        torch.searchsorted(csr.rowptr, some, right=True) - 1,
        some if csr.col is None else csr.col[some].long(),
        some if csr.edge_id is None else csr.edge_id[some].long(),
    )
    with torch.no_grad():
        groups = zip((row, col, edge), places, strict=True)
        sample = function(*(t.index_select(0, at) for group, at in groups for t in listed(group)), *shared)
        acc = accumulate_type(sample.dtype)
        centre = sample.to(acc).mean(dim=0)

    def deviations(*ends: Tensor) -> Tensor:
        d = function(*ends).to(acc) - centre
        return torch.cat([d, d * d], dim=1)

    like = next(t for group in (row, col, edge) for t in listed(group))
    options: dict[str, Any] = {"parameters": learned, "shared": shared, "block": streaming.block_of(graph, like)}
    sums: Tensor = edge_mlp(graph, deviations, row, col, edge, **options)
    off, square = (sums.sum(dim=0) / graph.num_edges).chunk(2)
    return centre + off, square - off * off


def _move_on(norm: nn.BatchNorm1d, mean: Tensor, var: Tensor, count: int) -> None:
    """The running statistics after a call with these, as BatchNorm1d.forward leaves them."""
    if not norm.training or not norm.track_running_stats or norm.running_mean is None or norm.running_var is None:
        return
    share = 0.0 if norm.momentum is None else norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:
            share = 1.0 / float(norm.num_batches_tracked)
    with torch.no_grad():
        norm.running_mean.mul_(1 - share).add_(mean, alpha=share)
        norm.running_var.mul_(1 - share).add_(var, alpha=share * count / (count - 1))


def _normed(mean: Tensor, scale: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """What a BatchNorm makes of rows, given the statistics. x [B, k] -> [B, k]."""
    made = (x - mean) * scale
    return (made if bias is None else made + bias).to(x.dtype)
