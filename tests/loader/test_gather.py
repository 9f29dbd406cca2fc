"""Rows of features in slots: every width, few rows and so many that they are streamed past the caches."""

import pytest
import torch

from stretto.kernels import native as kernels
from stretto.loader.native_sampler import NativeSampler, NodeType, Sampling, Slice

STREAMED = 8 << 20  # bytes from which csrc/sampler/gather.cpp streams


@pytest.mark.parametrize("width", [1, 3, 4, 5, 17, 33, 64, 100, 400, 1001, 4096, 5000])
@pytest.mark.parametrize("share", [0.01, 1.0, 1.13])
def test_rows_are_the_right_ones(width, share):
    g = torch.Generator().manual_seed(width)
    n = 997
    x = torch.randint(-128, 127, (n, width), dtype=torch.int8, generator=g)
    rows = int(STREAMED * share) // width + 1
    rows = min(rows, 300_000)  # narrow rows are never streamed: enough is enough
    seeds = torch.randint(0, n, (rows,), generator=g)
    before = torch.arange(7 * n).view(n, 7)  # what lies beside it in the slot
    native = NativeSampler([NodeType(n)], [], 0, Sampling(0), [Slice(before), Slice(x), Slice(before)])
    slot = native.sample(0, 0, 0, [seeds], [None])
    assert torch.equal(slot.slice(1), x[seeds])
    assert torch.equal(slot.slice(0), before[seeds])
    assert torch.equal(slot.slice(2), before[seeds])


def test_streamed_rows_are_the_same_on_every_instruction_set():
    x = torch.randn(997, 100)
    seeds = torch.randint(0, 997, (STREAMED // 400 + 17,))
    native = NativeSampler([NodeType(997)], [], 0, Sampling(0), [Slice(x)])
    before = kernels.isa()
    try:
        for isa in kernels.isas():
            kernels.set_isa(isa)
            assert torch.equal(native.sample(0, 0, 0, [seeds], [None]).slice(0), x[seeds]), isa
    finally:
        kernels.set_isa(before)
