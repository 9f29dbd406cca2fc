"""widened: narrow rows times a wide weight, the bias a column of it."""

import pytest
import torch

from stretto.ops import tall_product, widened
from stretto.ops.variants import VARIANTS


def _inputs(n, i, o, dtype):
    torch.manual_seed(0)
    return [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in ((n, i), (o, i), (o,))]


@pytest.mark.parametrize("variant", VARIANTS["product"]["cpu"], ids=lambda v: v.backend)
@pytest.mark.parametrize("n", [0, 1, 300, 4097])
@pytest.mark.parametrize(("i", "o"), [(1, 8), (3, 64), (32, 600)])
def test_result_and_gradients_are_those_of_linear(n, i, o, variant, monkeypatch):
    """By torch's products, where the bias is a column, and by ours, for which the matrices are tall enough at 4097."""
    monkeypatch.setattr(tall_product, "LEAST_WORK", 0)
    monkeypatch.setattr(tall_product.picker, "known", lambda key: variant)
    inputs = _inputs(n, i, o, torch.float64)
    assert widened.by_our_kernel(inputs[0], inputs[1].t(), inputs[2]) == (n == 4097 and variant.backend != "torch")
    out, wanted = widened.widened(*inputs), torch.nn.functional.linear(*inputs)
    flow = torch.randn_like(wanted)
    torch.testing.assert_close(out, wanted)
    found, true = torch.autograd.grad(out, inputs, flow), torch.autograd.grad(wanted, inputs, flow)
    for a, b in zip(found, true, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("learned", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_only_what_is_learned_gets_a_gradient(learned):
    inputs = [t.detach().requires_grad_(k in learned) for k, t in enumerate(_inputs(50, 4, 40, torch.float64))]
    widened.widened(*inputs).square().sum().backward()
    again = [t.detach().requires_grad_(k in learned) for k, t in enumerate(inputs)]
    torch.nn.functional.linear(*again).square().sum().backward()
    for a, b in zip(inputs, again, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad)


def test_gradcheck_and_second_derivatives():
    inputs = _inputs(5, 2, 17, torch.float64)
    assert torch.autograd.gradcheck(widened.widened, inputs)
    assert torch.autograd.gradgradcheck(widened.widened, inputs)


def test_made_for_wide_results_of_one_type_only(monkeypatch):
    monkeypatch.setattr(widened.pool, "LEAST", 0)
    x, weight, _ = _inputs(10, 4, 32, torch.float32)
    assert widened.takes(x, weight)
    assert not widened.takes(x, weight[:31])
    assert not widened.takes(x.double(), weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not widened.takes(x, weight)


def test_a_wide_layer_agrees_with_stock(monkeypatch):
    import torch_geometric.nn as pyg

    from stretto import accelerate

    calls = []
    monkeypatch.setattr(widened.pool, "LEAST", 0)
    real = widened.widened
    monkeypatch.setattr(widened, "widened", lambda *inputs: calls.append(1) or real(*inputs))
    torch.manual_seed(0)
    edge_index = torch.randint(30, (2, 400))
    stock = pyg.GATConv(4, 64).double()
    fast = accelerate(pyg.GATConv(4, 64).double())
    fast.load_state_dict(stock.state_dict())
    results = []
    for conv in (stock, fast):
        x = torch.linspace(-1, 1, 120, dtype=torch.float64).view(30, 4).requires_grad_()
        out = conv(x, edge_index)
        out.pow(2).sum().backward()
        results.append([out, x.grad, *(p.grad for p in conv.parameters())])
    assert calls
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
