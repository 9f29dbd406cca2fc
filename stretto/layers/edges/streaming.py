"""Messages that only a network on each edge can make: all at once while they are few, else in blocks of edges.

All at once an array of edges x channels exists for every layer of that network, and backward finds it; in blocks
(ops.edge_mlp) no more than a block's share of it ever does, and backward computes it again.

On a processor blocks of 16 MiB stay in its caches and cost little. On a card every block is a dozen launches, and
messages that are made twice cost twice: GINE, EdgeConv and GATv2 with edge features took 11, 5 and 3 times stock's time
there in such blocks, and take 0.37, 0.23 and 0.18 of it all at once (benchmarks/results/breadth.csv).
So a card makes all at once what its memory holds, and blocks as large as that where it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.nn.dense import Linear
from torch_geometric.nn.models.schnet import ShiftedSoftplus
from torch_geometric.nn.norm import BatchNorm, LayerNorm

from stretto import kernels
from stretto.graph import Graph
from stretto.layers import edges
from stretto.layers.base import hooked
from stretto.ops.edge_mlp import BLOCK, Ends, edge_mlp, listed
from stretto.ops.extremum import extremum

LARGE = 1 << 25  # bytes of one array of messages from which on they are made in blocks, on a processor


class How(NamedTuple):
    """How messages were made, and whether they were there all at once, as stock's are."""

    text: str
    builds: bool

    def __str__(self) -> str:
        return self.text


IN_BLOCKS, AT_ONCE = How("in blocks", False), How("at once", True)
BYTES = 4 << 10  # of an edge in a block on a card: four arrays of 256 channels of fp32

# Modules whose result for a row depends on that row alone, and on no random number.
ROW_BY_ROW = (
    nn.Linear,
    Linear,
    nn.Identity,
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.PReLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Tanh,
    nn.Sigmoid,
    nn.LogSigmoid,
    nn.Softsign,
    nn.Softplus,
    ShiftedSoftplus,
    nn.Hardtanh,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.LayerNorm,
    nn.RMSNorm,
)
IN_EVAL = (nn.BatchNorm1d, nn.Dropout)  # these too, once they are not training


def row_by_row(modules: Iterable[Any], *, random: bool = False) -> bool:
    """Whether a chain of modules may see edges in blocks: no batch statistics, no random numbers, nobody watching.

    random: whether Dropout in training may be among them. In blocks it drops other values than all at once: the same
    distribution and reproducible by seed, not the same bits.
    """
    return all(_sees_rows(module, random) for module in modules)


def _sees_rows(module: Any, random: bool) -> bool:
    if not isinstance(module, nn.Module) or hooked(module):
        return False
    kind = type(module)
    if kind is nn.Sequential or kind is BatchNorm:  # PyG's wraps torch's
        return row_by_row(module.children(), random=random)
    if kind is nn.Dropout:
        return not module.training or (random and replayable())
    if isinstance(module, nn.BatchNorm1d):
        return kind is nn.BatchNorm1d and not module.training and module.running_mean is not None
    if isinstance(module, LayerNorm):
        return kind is LayerNorm and module.mode == "node"  # "graph": one mean of all edges
    return kind in ROW_BY_ROW


def replayable() -> bool:
    """Whether backward can draw random numbers again: not while a CUDA graph is captured."""
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def parameters_of(modules: Iterable[Any]) -> list[Tensor]:
    """What a chain of modules learns, each once."""
    result = {id(p): p for module in modules if isinstance(module, nn.Module) for p in module.parameters()}
    return list(result.values())


def as_now(function: Callable[..., Tensor], modules: Iterable[Any]) -> Callable[..., Tensor]:
    """The function, with the modules that it runs as they are now, whenever it runs.

    Backward makes messages again: by then a module may be in another mode, have other modules inside, or, under
    torch.func.functional_call, have its own parameters back.
    """
    inner = [each for module in modules if isinstance(module, nn.Module) for each in module.modules()]
    states = [(each, *_state(each)) for each in inner]

    def run(*inputs: Any) -> Tensor:
        changed = [(each, mode, held) for each, mode, held in states if _differs(each, mode, held)]
        since = [(each, *_state(each)) for each, _, _ in changed]
        try:
            for each, mode, held in changed:
                _set_state(each, mode, held)
            return function(*inputs)
        finally:
            for each, mode, held in since:
                _set_state(each, mode, held)

    return run


Held = list[dict[str, Any]]  # the parameters, buffers and modules of a module, by name


def _tables(module: nn.Module) -> list[Any]:
    return [module._parameters, module._buffers, module._modules]


def _state(module: nn.Module) -> tuple[bool, Held]:
    return module.training, [dict(table) for table in _tables(module)]


def _set_state(module: nn.Module, mode: bool, held: Held) -> None:
    module.training = mode
    for table, kept in zip(_tables(module), held, strict=True):
        table.update(kept)


def _differs(module: nn.Module, mode: bool, held: Held) -> bool:
    tables = zip(_tables(module), held, strict=True)
    return module.training != mode or any(
        table.get(name) is not value for table, kept in tables for name, value in kept.items()
    )


def large(graph: Graph, width: int, like: Tensor, patience: int = 1) -> bool:
    """Whether one array of edges x width is so large that it is not to be made.

    A card's answer is kept with the graph: what checkpointing runs again in backward must decide as it did before.
    """
    nbytes = graph.num_edges * width * like.element_size()
    if nbytes < patience * LARGE:
        return False
    if not kernels.has_own_memory(like.device):
        return True
    answer: bool = graph.derived(("large", nbytes), lambda: nbytes > kernels.room(like.device))
    return answer


def block_of(graph: Graph, like: Tensor) -> int:
    """How many edges a block holds. A card's answer is kept with the graph: Dropout draws anew for every block."""
    if not kernels.has_own_memory(like.device):
        return BLOCK
    size: int = graph.derived("edges of a block", lambda: max(BLOCK, kernels.room(like.device) // BYTES))
    return size


def reduced(
    graph: Graph,
    function: Callable[..., Tensor],
    row: Ends,
    col: Ends,
    edge: Ends,
    reduce: Sequence[str],
    *,
    width: int,
    parameters: Sequence[Tensor],
    modules: Iterable[Any] = (),
    shared: Sequence[Tensor] = (),
    steady: bool,
    patience: int = 1,
    own: Tensor | None = None,
) -> tuple[list[Tensor], How]:
    """Every reduction of function(row_i, col_j, edge, *shared), and how they were made.

    row [n, ...], col [m, ...], edge [E, ...], or several of each -> [n, k] each; reduce: names as edge_mlp takes them.
    width: of the widest array per edge. parameters: what the function has gradients for. modules: those that it runs.
    steady: whether blocks of edges give what all edges at once give (a Dropout among them may draw others). patience:
    how many times LARGE an array may be; more than 1 where making messages twice costs more time than stock takes.
    own [n, k]: added to max and min (not to the others), as if every message of a row had it.
    """
    rows, cols, inputs = listed(row), listed(col), listed(edge)
    like = next(t for t in (*rows, *cols, *inputs))
    if steady and large(graph, width, like, patience):
        options: dict[str, Any] = {"parameters": parameters, "shared": shared, "own": own}
        options["block"] = block_of(graph, like)
        result = edge_mlp(graph, as_now(function, modules), row, col, edge, reduce=tuple(reduce), **options)
        return list(result), IN_BLOCKS
    at_ends = [*(edges.at_targets(graph, t) for t in rows), *(edges.at_sources(graph, t) for t in cols)]
    message = function(*at_ends, *inputs, *shared)
    return [_at_once(graph, message, name, own) for name in reduce], AT_ONCE


def _at_once(graph: Graph, message: Tensor, name: str, own: Tensor | None) -> Tensor:
    """One reduction of all messages. [E, k] -> [n, k]."""
    if name == "each":
        return message
    if name == "square":
        return edges.reduce_edges(graph, message * message, "mean")
    if own is not None and name in ("max", "min"):
        return extremum(graph.segments, message, None, name, own)
    return edges.reduce_edges(graph, message, name)


def run(modules: Sequence[Any], x: Tensor) -> Tensor:
    """A chain of modules, one after the other."""
    for module in modules:
        x = module(x)
    return x
