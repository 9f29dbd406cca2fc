"""What a rank does with a model that torch has wrapped: DDP, fully_shard, which gives layers classes of its own."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import stretto
from stretto.layers import record_of
from stretto.layers.layer import stock_of
from stretto.plug.classes import class_of
from tests.graphs import random_edges
from tests.layers.test_left_behind import IN, Net, explained

N = 30
DOORS = ("accelerate first", "accelerate then", "restore between", "accelerated", "patch")


class Model(torch.nn.Module):
    """Two layers, one of a user's own between them, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = Net(), torch.nn.BatchNorm1d(4)
        self.conv = pyg.GCNConv(2, 4)

    def forward(self, x, edge_index):
        return self.norm(self.conv(self.inner(x, edge_index), edge_index))


def wrap(model: Model, way: str) -> Any:
    if way == "DDP":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers(model):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh) if way == "whole" else model


def layers(model: Any) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, pyg.MessagePassing)]


def steps(model: Any, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    """The results of some steps, each followed by two evaluations."""
    optimizer, results = torch.optim.SGD(model.parameters(), 0.05), []
    for _ in range(2):
        model.train()
        optimizer.zero_grad()
        out = model(x, edges)
        out.square().mean().backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            results += [out.detach(), model(x, edges), model(x, edges)]
    return torch.stack(results)


def opened(model: Model, way: str, door: str, x: torch.Tensor, edges: torch.Tensor) -> tuple[torch.Tensor, Any]:
    if door == "accelerated":
        with stretto.accelerated(model):
            wrapped = wrap(model, way)
            return steps(wrapped, x, edges), wrapped
    if door == "accelerate first":
        stretto.accelerate(model)
    wrapped = wrap(model, way)
    if door == "restore between":
        stretto.restore(stretto.accelerate(wrapped))
    if door == "patch":
        stretto.patch()
    try:
        return steps(stretto.accelerate(wrapped) if door != "patch" else wrapped, x, edges), wrapped
    finally:
        if door == "patch":
            stretto.unpatch()


def run(ways: tuple[str, ...]) -> list[str]:
    """What is wrong, way by way and door by door."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    base, other = Model(), Net()
    x, edges = torch.randn(N, IN), random_edges(N, N, 140, 7 + dist.get_rank())
    mask = explained(copy.deepcopy(other), x)
    wrong = [f"{way}, {text}" for way in ways for text in _doors(way, base, x, edges)]
    if not torch.allclose(explained(stretto.accelerate(copy.deepcopy(other)), x), mask, rtol=1e-4, atol=1e-5):
        wrong.append("another model is explained otherwise")
    return wrong


def _doors(way: str, base: Model, x: torch.Tensor, edges: torch.Tensor) -> list[str]:
    beside = wrap(copy.deepcopy(base), way)
    kinds = [(type(m), type(m).__mro__) for m in beside.modules()]
    wanted = steps(wrap(copy.deepcopy(base), way), x, edges)
    wrong = []
    for door in DOORS:
        got, model = opened(copy.deepcopy(base), way, door, x, edges)
        if not torch.allclose(got, wanted, rtol=1e-9, atol=1e-9):
            wrong.append(f"{door}: differs by {float((got - wanted).abs().max())}")
        wrong += [f"{door}: {type(m).__name__} {record_of(m)}" for m in layers(model) if record_of(m).path != "fast"]
        stretto.restore(model)
        wrong += [f"{door}: {type(m)} is left" for m in model.modules() if stock_of(class_of(m)) is not None]
        if door in ("accelerate then", "restore between"):
            now = [type(m) for m in model.modules()]
            wrong += [] if now == [kind for kind, _ in kinds] else [f"{door}: other classes than before"]
        if [(type(m), type(m).__mro__) for m in beside.modules()] != kinds:
            wrong.append(f"{door}: the classes of another model have changed")
    return wrong
