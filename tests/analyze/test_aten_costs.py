"""Formulas of torch's own ops: losses, activations and embeddings that models end and begin with."""

import pytest
import torch
import torch.nn.functional as F

from stretto.observe.trace import Recorder

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


ROWS = torch.arange(10).repeat_interleave(3)  # of 30 entries of 10 x 10
INDEX, TWO = torch.tensor([1, 2]), torch.rand(2, 4)


def _attend(**options):
    made = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.rand(3, 7, 8)
    with torch.no_grad():
        made(x, x, x, **options)


def _recur():
    with torch.no_grad():
        torch.nn.LSTM(4, 5).eval()(torch.rand(7, 3, 4))


def _normed():
    weight = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 3)).weight
    weight.sum().backward()


def _unscaled():
    grads, found = [torch.rand(3, 4), torch.rand(3)], torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.ones(1))


def _compressed():
    torch.sparse_csr_tensor(torch.arange(0, 31, 3), ROWS, torch.rand(30), (10, 10))


# name, what runs it, flops, bytes: counted by hand
COUNTED = [
    # entries are compared with the next; 30 and 11 numbers of 8 bytes
    ("_convert_indices_from_coo_to_csr", lambda: torch._convert_indices_from_coo_to_csr(ROWS, 10), 30, 8 * 41),
    ("_convert_indices_from_csr_to_coo",
     lambda: torch._convert_indices_from_csr_to_coo(torch.arange(0, 31, 3), ROWS), 0, 8 * (11 + 30 + 60)),
    ("sparse_compressed_tensor", _compressed, 0, 0),  # it is not looked at
    ("index_copy_", lambda: torch.zeros(10, 4).index_copy_(0, INDEX, TWO), 0, 2 * 32 + 16),
    ("index_copy", lambda: torch.zeros(10, 4).index_copy(0, INDEX, TWO), 0, 2 * 32 + 16 + 2 * 160),
    ("index_fill", lambda: torch.zeros(10, 4).index_fill(0, INDEX, 1.0), 0, 160 + 16 + 160),
    ("linalg_cross", lambda: torch.linalg.cross(X[:5, :3], Y[:5, :3]), 5 * 3 * 3, 3 * 5 * 3 * 4),
    ("_weight_norm_interface", _normed, 3 * 12 + 2 * 3, 4 * (12 + 3) * 2),
    ("_weight_norm_interface_backward", _normed, 5 * 12 + 4 * 3, 4 * (12 + 12 + 3 + 3 + 12 + 3)),
    ("_amp_foreach_non_finite_check_and_unscale_", _unscaled, 2 * 15, 2 * 4 * 15 + 4 + 4),
    # 84 rows are projected, 21 queries scaled, 2 x 294 scores made and used, 294 x 5 for their softmax
    ("_native_multi_head_attention", lambda: _attend(need_weights=False),
     84 * (2 * 8 * 8 + 8) + 21 * 8 + 2 * (2 * 294 * 4) + 5 * 294, None),
    # the mask is added, and the mean of two heads taken
    ("_native_multi_head_attention", lambda: _attend(key_padding_mask=torch.arange(7).expand(3, 7) > 4),
     84 * (2 * 8 * 8 + 8) + 21 * 8 + 2 * (2 * 294 * 4) + 6 * 294 + 294 + 147, None),
    # 21 rows: four gates of 5 from 4 and 5 numbers, a sum and two biases; nonlinear 4, cell 3, state 2
    ("mkldnn_rnn_layer", _recur, 21 * (2 * 20 * (4 + 5) + 3 * 20 + (4 + 3 + 2) * 5), None),
    ("_is_any_true", lambda: torch._is_any_true(X > 0), 240, 240 + 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "call", "flops", "size"), COUNTED, ids=[name for name, *_ in COUNTED])
def test_ops_are_counted_as_by_hand(name, call, flops, size):
    recorder = Recorder()
    with recorder.recording():
        call()
    found = [op for op in recorder.trace if op.name.partition("::")[2].split(".")[0] == name]
    if not found:
        pytest.skip(f"this torch does not run {name} here")
    assert not recorder.trace.unknown
    assert found[0].cost.flops == flops
    assert size is None or found[0].cost.bytes == size
    assert found[0].cost.bytes > 0 or size == 0


def test_products_of_two_sparse_matrices_stay_unknown():
    """What fills in is not known beforehand. Their sizes are told, for they have no dense operand."""
    matrix = torch.sparse_coo_tensor(torch.stack([ROWS, ROWS.flip(0)]), torch.rand(30), (10, 10)).coalesce()
    recorder = Recorder()
    with recorder.recording():
        matrix @ matrix
    (op,) = recorder.trace
    assert recorder.trace.unknown == ["aten::mm"]
    assert op.shapes == f"10x10 of {matrix._nnz()}, 10x10 of {matrix._nnz()}"
