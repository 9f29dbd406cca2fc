"""Formulas of torch's own ops: losses, activations and embeddings that models end and begin with."""

import pytest
import torch
import torch.nn.functional as F

from stretto.analyze.trace import Recorder

X, Y, KINDS = torch.rand(30, 8), torch.rand(30, 8), torch.randint(8, (30,))
OPS = {
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, Y),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), Y),
    "mse_loss": lambda x: F.mse_loss(x, Y),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, Y),
    "huber_loss": lambda x: F.huber_loss(x, Y),
    "softplus": F.softplus,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "log_sigmoid": F.logsigmoid,
    "glu": F.glu,
    "prelu": lambda x: F.prelu(x, torch.full((1,), 0.2, requires_grad=True)),
    "roll": lambda x: x.roll(1, 0),
    "embedding": lambda x: F.embedding(KINDS, x),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
}


PLACES, TABLE, WIDE = torch.randint(30, (40,)), torch.zeros(30, 8), torch.rand(40, 8)
TALL, SQUARE, BIAS = torch.rand(30, 8), torch.rand(8, 5), torch.rand(5)
# What runs -> (flops, bytes) by hand: values of 4 bytes, places of 8.
BY_HAND = {
    "mm": (lambda: TALL @ SQUARE, 2 * 30 * 8 * 5, 4 * (30 * 8 + 8 * 5 + 30 * 5)),
    "addmm": (
        lambda: torch.addmm(BIAS, TALL, SQUARE), 2 * 30 * 8 * 5 + 30 * 5, 4 * (5 + 30 * 8 + 8 * 5 + 30 * 5),
    ),
    "index_select": (lambda: TALL.index_select(0, PLACES), 0, 8 * 40 + 2 * 4 * 40 * 8),
    "index": (lambda: TALL[PLACES], 0, 8 * 40 + 2 * 4 * 40 * 8),
    "index_add_": (lambda: TABLE.index_add_(0, PLACES, WIDE), 40 * 8, 8 * 40 + 3 * 4 * 40 * 8),
    "scatter_add_": (
        lambda: TABLE.scatter_add_(0, PLACES[:, None].expand(40, 8), WIDE), 40 * 8, 8 * 40 + 3 * 4 * 40 * 8,
    ),
    "relu": (lambda: TALL.relu(), 30 * 8, 2 * 4 * 30 * 8),
    "sum": (lambda: TALL.sum(0), 30 * 8, 4 * (30 * 8 + 8)),
    "_log_softmax": (lambda: TALL.log_softmax(1), 5 * 30 * 8, 2 * 4 * 30 * 8),
    "_log_softmax_backward_data": (
        lambda: torch.ops.aten._log_softmax_backward_data(TALL, X, 1, torch.float32), 4 * 30 * 8, 3 * 4 * 30 * 8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_flops_and_bytes_by_hand(name):
    call, flops, moved = BY_HAND[name]
    recorder = Recorder()
    with recorder.recording():
        call()
    (op,) = (op for op in recorder.trace if op.cost.family != "view")
    assert op.name.split(".")[0] == f"aten::{name}"
    assert (op.cost.flops, op.cost.bytes) == (flops, moved)


@pytest.mark.parametrize("name", OPS)
def test_losses_activations_and_embeddings_are_counted(name):
    x = X.clone().requires_grad_()
    recorder = Recorder()
    with recorder.recording():
        OPS[name](x).sum().backward()
    assert not recorder.trace.unknown
    assert recorder.trace.bytes > 0


def test_the_gradient_of_an_embedding_is_a_scatter():
    table = torch.rand(8, 16, requires_grad=True)
    recorder = Recorder()
    with recorder.recording():
        F.embedding(KINDS, table).sum().backward()
    (op,) = (op for op in recorder.trace if op.name == "aten::embedding_dense_backward")
    assert (op.cost.family, op.cost.flops, op.cost.row) == ("scatter", 30 * 16, 16 * 4)
