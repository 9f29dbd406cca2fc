"""Several linear maps of one x, and sums in kept buffers, against torch's own."""

import pytest
import torch
from torch.nn import functional as F

from stretto.memory import pool
from stretto.ops import projections as module
from stretto.ops.projections import plus, projections


@pytest.fixture(autouse=True)
def _pool_from_the_first_byte(monkeypatch):
    monkeypatch.setattr(pool, "LEAST", 1)


def maps(dtype=torch.float64):
    draw = [torch.randn(o, 5, dtype=dtype, requires_grad=True) for o in (1, 4, 7)]
    return [(draw[0], None), (draw[1], torch.randn(4, dtype=dtype, requires_grad=True)), (draw[2], None)]


@pytest.mark.parametrize("rows", [0, 1, 6])
@pytest.mark.parametrize("used", [(0, 1, 2), (1,), (0, 2)])
def test_results_and_gradients_are_those_of_linear(rows, used):
    x = torch.randn(rows, 5, dtype=torch.float64, requires_grad=True)
    given = maps()
    parameters = [x, *(w for w, _ in given), given[1][1]]
    ours, torchs = projections(x, given), [F.linear(x, w, b) for w, b in given]
    for a, b in zip(ours, torchs, strict=True):
        torch.testing.assert_close(a, b)
    seeds = {k: torch.randn_like(ours[k]) for k in used}
    found, wanted = (
        torch.autograd.grad(sum((r[k] * seeds[k]).sum() for k in used), parameters, allow_unused=True)
        for r in (ours, torchs)
    )
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


def test_differentiable_twice():
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    (w, _), (v, b), _ = maps()
    call = lambda x, w, v, b: projections(x, [(w, None), (v, b)])  # noqa: E731
    assert torch.autograd.gradcheck(call, (x, w, v, b))
    assert torch.autograd.gradgradcheck(call, (x, w, v, b))
    for y in (torch.randn(5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)):
        assert torch.autograd.gradcheck(plus, (x, y.requires_grad_()))
        assert torch.autograd.gradgradcheck(plus, (x, y))


def test_what_is_not_plain_goes_to_torch(monkeypatch):
    monkeypatch.setattr(module, "_projections", None)  # calling it would raise
    x = torch.randn(3, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert projections(x, maps(torch.float32))[0].dtype == torch.bfloat16
    meta = projections(x.to("meta"), [(torch.empty(2, 5, device="meta"), None)])
    assert meta[0].device.type == "meta"


def test_without_gradients_nothing_is_recorded():
    x = torch.randn(3, 5, dtype=torch.float64)
    with torch.no_grad():
        result = projections(x, maps())[1]
        assert result.grad_fn is None
        assert plus(result, torch.ones(4, dtype=torch.float64)).grad_fn is None
