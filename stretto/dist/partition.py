"""Which rank owns which node: contiguous blocks of an order of the nodes that hold about as many edges each."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stretto.errors import expect

PARTITIONERS = ("blocks", "breadth-first", "random")


def partition(edge_index: Tensor, num_nodes: int, parts: int, method: str = "breadth-first") -> Tensor:
    """The owner of every node. edge_index [2, E] -> [num_nodes] int64 in 0 .. parts - 1."""
    expect(parts >= 1, f"partition: 'parts' is {parts}, wanted 1 or more")
    source, target = (row.numpy() for row in edge_index.cpu())
    return torch.from_numpy(cut(order_of(source, target, num_nodes, method), target, parts))


def order_of(source: np.ndarray, target: np.ndarray, num_nodes: int, method: str) -> np.ndarray:
    """The nodes in the order in which a partitioner cuts them."""
    expect(method in PARTITIONERS, f"partition: 'method' is {method!r}, wanted one of {', '.join(PARTITIONERS)}")
    if method == "random":
        return np.random.default_rng(0).permutation(num_nodes)
    if method == "blocks" or not num_nodes:
        return np.arange(num_nodes)
    degree = np.bincount(target, minlength=num_nodes)
    level = levels(source, target, num_nodes, int(degree.argmax()))
    level[level < 0] = level.max() + 1
    return np.lexsort((np.arange(num_nodes), level))


def cut(order: np.ndarray, target: np.ndarray, parts: int) -> np.ndarray:
    """The owner of every node, parts taking the nodes in this order until each has its share of the edges."""
    weight = np.bincount(target, minlength=order.size)[order] + 1
    share = np.cumsum(weight) / max(1, weight.sum())
    owner = np.empty(order.size, np.int64)
    owner[order] = np.minimum((share * parts - 1e-12).astype(np.int64), parts - 1)
    return owner


def levels(source: np.ndarray, target: np.ndarray, num_nodes: int, start: int) -> np.ndarray:
    """Breadth-first distance of every node from `start`, edges taken both ways; -1: unreachable."""
    pointers, cols = _neighbours(source, target, num_nodes)
    level = np.full(num_nodes, -1, np.int64)
    front = np.array([start])
    level[start] = depth = 0
    while front.size:
        depth += 1
        counts = pointers[front + 1] - pointers[front]
        places = np.repeat(pointers[front] - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
        reached = cols[places + np.arange(counts.sum())]
        front = np.unique(reached[level[reached] < 0])
        level[front] = depth
    return level


def _neighbours(source: np.ndarray, target: np.ndarray, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Neighbours in either direction, as pointers and columns."""
    rows, cols = np.concatenate([source, target]), np.concatenate([target, source])
    order = np.argsort(rows, kind="stable")
    pointers = np.zeros(num_nodes + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=num_nodes), out=pointers[1:])
    return pointers, cols[order]
