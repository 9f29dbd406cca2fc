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
