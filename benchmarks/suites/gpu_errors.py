"""Errors of every result and gradient of a layer on a CUDA device against fp64, ours beside stock's.

`python -m benchmarks.suites.gpu_errors --csv FILE`. A leaky ReLU has two slopes: a score that is zero but for rounding
may get the other one, in ours as in stock, and the gradients differ by what that edge carries. For GAT the scores whose
sign differs from fp64's are counted, and both are also compared with fp64 given their own signs: what is left is
rounding.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import stretto
from benchmarks.suites import results as rows
from benchmarks.suites.gpu import GRAPHS, LAYERS, _both, relative, rmat
from stretto.errors import expect

MODELS = ("gcn", "sage", "gin", "gat", "gatv2", "transformer")
CALLS = 4  # of ours: the last is played from a tape


def errors(edge_index: Tensor, num_nodes: int) -> Iterator[rows.Row]:
    """A row for every result and gradient of every model."""
    _, _, i, o = GRAPHS["g1"]
    torch.manual_seed(1)
    x = torch.randn(num_nodes, i, device="cuda", requires_grad=True)
    upstream = torch.randn(num_nodes, o, device="cuda")
    for model in MODELS:
        torch.manual_seed(0)
        stock = LAYERS[model](i, o, False).cuda()
        got, base, exact = results(stock, x, edge_index, upstream)
        least = 1e-4 * max(float(t.norm()) for t in exact)  # a gradient that is zero but for rounding
        for k, name in enumerate(["out", "x", *(n for n, _ in stock.named_parameters())]):
            one, other = relative(got[k], exact[k], least), relative(base[k], exact[k], least)
            yield _row(model, name, "seeds 1, 0", one, other)
        del got, base, exact
        gc.collect()
        torch.cuda.empty_cache()


def results(stock: Any, x: Tensor, edge_index: Tensor, upstream: Tensor) -> tuple[tuple[Tensor, ...], ...]:
    """Result and gradients by ours, by stock and by stock in fp64."""
    ours, exact = stretto.accelerate(copy.deepcopy(stock)), copy.deepcopy(stock).double()
    call = _both(ours, x, edge_index, upstream)
    for _ in range(CALLS):
        got = call()
    wanted = _both(exact, x.detach().double().requires_grad_(), edge_index, upstream.double())()
    return got, _both(stock, x, edge_index, upstream)(), wanted


def signs(edge_index: Tensor, num_nodes: int, seeds: tuple[tuple[int, int], ...]) -> Iterator[rows.Row]:
    """GAT's gradient of x for several inputs: errors, scores of the other sign, and errors given the own signs."""
    _, _, i, o = GRAPHS["g1"]
    loops = torch.arange(num_nodes, device="cuda")
    edges = torch.cat([edge_index, torch.stack([loops, loops])], dim=1)
    for seed, weights in seeds:
        torch.manual_seed(seed)
        x = torch.randn(num_nodes, i, device="cuda", requires_grad=True)
        upstream = torch.randn(num_nodes, o, device="cuda")
        torch.manual_seed(weights)
        layer = LAYERS["gat"](i, o, False).cuda()
        got, base, exact = results(layer, x, edge_index, upstream)
        right = _positive(layer, x.detach().double(), edges)
        found: dict[str, float] = {}
        for name, made, mine in (
            ("ours", got, _our_positive(layer, x.detach(), edges)),
            ("stock", base, _positive(layer, x.detach(), edges)),
        ):
            others = int((mine != right).sum())
            given = _with_signs(layer, x, edges, upstream, mine)
            found[name] = relative(made[1], exact[1])
            found |= {f"{name}_other_signs": others, f"{name}_given_its_signs": relative(made[1], given)}
            del given
        yield _row("gat", "gradient of x", f"seeds {seed}, {weights}", found.pop("ours"), found.pop("stock"), **found)
        del got, base, exact


def _row(model: str, tensor: str, drawn: str, ours: float, stock: float, **more: float) -> rows.Row:
    case, measured = {"model": model, "tensor": tensor, "input": drawn}, {"stretto": (ours,) * 3, "stock": (stock,) * 3}
    command = "python -m benchmarks.suites.gpu_errors"
    return rows.row(
        "errors", case, measured, stock="stock", unit="relative error", device="cuda", command=command, more=more
    )


def _scores(layer: Any, v: Tensor) -> tuple[Tensor, Tensor]:
    """What every node adds to the scores of its edges as their source and as their destination: v [n, h * f]."""
    heads = v.view(v.size(0), layer.heads, -1)
    return (heads * layer.att_src.to(v)).sum(-1), (heads * layer.att_dst.to(v)).sum(-1)


@torch.no_grad()
def _positive(layer: Any, x: Tensor, edges: Tensor) -> Tensor:
    """Where stock's scores are positive, in the type of x: [E, h]."""
    source, target = _scores(layer, x @ layer.lin.weight.to(x).t())
    return source[edges[0]] + target[edges[1]] > 0


@torch.no_grad()
def _our_positive(layer: Any, x: Tensor, edges: Tensor) -> Tensor:
    """Where the scores of our kernels are positive."""
    kernel = importlib.import_module("stretto.kernels.triton.product").product_with_scores
    _, source, target = kernel(x, layer.lin.weight.t(), layer.att_src, layer.att_dst)
    positive: Tensor = source[edges[0]] + target[edges[1]] > 0
    return positive


def _with_signs(layer: Any, x: Tensor, edges: Tensor, upstream: Tensor, positive: Tensor) -> Tensor:
    """The gradient of x in fp64, where the slope of every score is given."""
    wide, x = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
    v = x @ wide.lin.weight.t()
    source, target = _scores(wide, v)
    score = source[edges[0]] + target[edges[1]]
    score = torch.where(positive, score, wide.negative_slope * score)
    index = edges[1].unsqueeze(1).expand_as(score)
    top = torch.full_like(source, -torch.inf).scatter_reduce(0, index, score.detach(), "amax")
    part = (score - top[edges[1]]).exp()
    alpha = part / torch.zeros_like(source).scatter_add(0, index, part)[edges[1]]
    messages = alpha.unsqueeze(-1) * v.view(x.size(0), wide.heads, -1)[edges[0]]
    out = torch.zeros_like(v).index_add(0, edges[1], messages.flatten(1)) + wide.bias
    return torch.autograd.grad(out, x, upstream.double())[0]


def main() -> None:
    """The same from a bare machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, help="put the rows there, too")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    expect(torch.cuda.is_available(), "bench gpu_errors: no CUDA device here")
    torch.backends.cuda.matmul.allow_tf32 = False
    scale, draws, _, _ = GRAPHS["g1"]
    edge_index, num_nodes = rmat(scale, draws), 1 << scale
    seeds = ((1, 0), *((k, k) for k in range(1, 11)))  # the first: the input and weights of `errors`
    for found in (errors(edge_index, num_nodes), signs(edge_index, num_nodes, seeds)):
        for row in found:
            logging.getLogger("stretto").info("%s", row)
            rows.save(given.csv, [row])


if __name__ == "__main__":
    main()
