"""A message() that does more than return a product: what it does to its arguments happens as in stock."""

from __future__ import annotations

import copy

import pytest
import torch
from torch_geometric.nn import MessagePassing

import stretto
from stretto.layers import record_of
from stretto.plug import generic

X = torch.randn(30, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
EDGES = torch.randint(30, (2, 140), generator=torch.Generator().manual_seed(1))
WEIGHT = torch.rand(140, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


class Layer(MessagePassing):
    def forward(self, x, edge_index, w):
        return self.propagate(edge_index, x=x, w=w)


class EditsSource(Layer):
    def message(self, x_j, w):
        x_j.relu_()
        return x_j


class Multiplies(Layer):
    def message(self, x_j, w):
        x_j.mul_(w.view(-1, 1))
        return x_j


class EditsWeight(Layer):
    def message(self, x_j, w):
        w.clamp_(0, 0.5)
        return w.view(-1, 1) * x_j


class Augments(Layer):
    def message(self, x_j, w):
        w *= x_j
        return w


class SetsItems(Layer):
    def message(self, x_j, w):
        w[0] = 7
        return x_j * w


class SetsAttribute(Layer):
    def message(self, x_j, w):
        w.seen = True
        return x_j * w


class KeywordCall(Layer):
    def message(self, x_j, w):
        return x_j.clamp(min=0)


ALL = (EditsSource, Multiplies, EditsWeight, Augments, SetsItems, SetsAttribute, KeywordCall)


@pytest.mark.parametrize("kind", ALL, ids=lambda k: k.__name__)
def test_edits_of_arguments_happen(kind):
    stock = kind()
    fast = stretto.accelerate(copy.deepcopy(stock))
    weight = WEIGHT.repeat(1, 6) if kind is Augments else WEIGHT
    mine, theirs = weight.clone(), weight.clone()
    torch.testing.assert_close(fast(X, EDGES, mine), stock(X, EDGES, theirs), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(mine, theirs)
    assert hasattr(mine, "seen") == hasattr(theirs, "seen")


class Collects(Layer):
    def message(self, x_j, w):
        w.append(x_j)
        return x_j


def test_a_list_among_the_arguments_is_filled():
    fast, kept = stretto.accelerate(Collects()), []
    fast(X, EDGES, kept)
    torch.testing.assert_close(kept, [X[EDGES[0]]])
    assert record_of(fast).reason == "message() does more than to compute what it returns"


def test_a_call_with_a_keyword_reads_nothing_else():
    assert generic.why_not(type(KeywordCall())) is None
    fast = stretto.accelerate(KeywordCall())
    fast(X, EDGES, WEIGHT)
    assert record_of(fast).reason == "message() is neither x_j nor w * x_j"
