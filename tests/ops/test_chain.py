"""Chains of Linears and activations, forward and backward, against plain PyTorch."""

import pytest
import torch

from stretto.errors import StrettoError
from stretto.kernels import cpu_chain, native, reference_chain

pytestmark = pytest.mark.skipif(native.library() is None, reason="libstretto is not loaded")
# stages, and the widths before, between and after their Linears
CHAINS = {
    "linear": ((("dense", 0),), (9, 33)),
    "GINE": ((("dense", 1), ("relu", None), ("dense", 1)), (64, 64, 64)),
    "SchNet": ((("dense", 1), ("softplus", 0.69), ("dense", 1), ("scale", None)), (50, 128, 128)),
    "widest": ((("dense", 1),), (256, 256)),
    "activation first": ((("relu", None), ("dense", 1), ("relu", None)), (7, 40)),
    "activations alone": ((("softplus", 0.5), ("scale", None), ("relu", None)), (21,)),
    "scaled after relu": ((("dense", 1), ("relu", None), ("scale", None)), (5, 18)),
    "deep": ((("dense", 1), ("relu", None), ("dense", 0), ("relu", None), ("dense", 1)), (5, 17, 100, 3)),
}


def made(name, rows, dtype):
    stages, widths = CHAINS[name]
    generator = torch.Generator().manual_seed(rows)
    tensors, place = [], 0
    for kind, detail in stages:
        if kind == "dense":
            i, o = widths[place : place + 2]
            tensors.append(torch.randn(o, i, generator=generator, dtype=dtype) / i**0.5)
            tensors += [torch.randn(o, generator=generator, dtype=dtype)] if detail else []
            place += 1
        elif kind == "scale":
            tensors.append(torch.rand(rows, generator=generator, dtype=dtype))
    return stages, torch.randn(rows, widths[0], generator=generator, dtype=dtype), tensors


def compare(name, rows, dtype):
    stages, x, tensors = made(name, rows, dtype)
    limits = {"rtol": 1e-9, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-3}
    wanted = reference_chain.chain(stages, x, tensors)
    kept = []
    out = cpu_chain.chain(stages, x, tensors, kept)
    torch.testing.assert_close(out, wanted, **limits)
    grad = torch.randn_like(out)
    dx, *dtensors = reference_chain.chain_grad(stages, x, tensors, grad)
    learned = [t.dim() == 2 or len(t) != rows or rows == 1 for t in tensors]
    for need_rows in (True, False):
        got, found = cpu_chain.chain_grad(stages, kept, tensors, grad, learned, need_rows)
        assert (got is not None) == need_rows
        if got is not None:
            torch.testing.assert_close(got, dx, **limits)
        for mine, theirs in zip(found, dtensors, strict=True):
            if mine is not None:
                torch.testing.assert_close(mine, theirs, **limits)
    return out, found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 700])
@pytest.mark.parametrize("name", CHAINS)
def test_chain(name, rows, dtype):
    compare(name, rows, dtype)


@pytest.mark.parametrize("isa", native.isas())
def test_every_instruction_set(isa, needs_native):
    native.set_isa(isa)
    for name in CHAINS:
        compare(name, 130, torch.float32)


def test_only_what_is_needed_is_computed():
    stages, x, tensors = made("deep", 70, torch.float64)
    kept = []
    grad = torch.randn_like(cpu_chain.chain(stages, x, tensors, kept))
    _, *wanted = reference_chain.chain_grad(stages, x, tensors, grad)
    for needs in ([0, 0, 1, 0, 0], [1, 0, 0, 0, 0], [0, 1, 0, 0, 1], [0, 0, 0, 0, 0]):
        none, found = cpu_chain.chain_grad(stages, kept, tensors, grad, [bool(n) for n in needs], False)
        assert none is None
        assert [f is not None for f in found] == [bool(n) for n in needs]
        for mine, theirs in zip(found, wanted, strict=True):
            if mine is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


def test_bits_do_not_depend_on_threads():
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            out, found = compare("GINE", 700, torch.float32)
            results.append([out, *found])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


def test_nan_stays_nan_and_tiny_numbers_count_as_zero():
    stages = (("dense", 0), ("relu", None))
    x = torch.tensor([[float("nan")], [1e-40], [1.0]])
    out = cpu_chain.chain(stages, x, [torch.ones(1, 1)], [])
    assert out[0].isnan()
    assert out[1].view(torch.int32).item() == 0
    assert out[2] == 1


def test_rows_too_wide_are_refused():
    with pytest.raises(StrettoError, match="at most 256"):
        cpu_chain.chain((("dense", 0),), torch.ones(2, 257), [torch.ones(3, 257)], [])
