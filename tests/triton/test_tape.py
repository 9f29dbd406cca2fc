"""Tapes: what can be played, with which memory, and what cannot."""

from importlib import import_module

import pytest
import torch

from stretto.kernels.csr import Csr


@pytest.fixture
def tape(triton_kernels):
    return import_module("stretto.kernels.triton.tape")


@pytest.fixture
def csr():
    return Csr(torch.zeros(1, dtype=torch.int64), None, None, 0, 0, 0)


def doubled_sums(x):
    """Two arrays of scratch memory that are never alive together, then the result."""
    column_sum = import_module("stretto.kernels.triton.column_sum").column_sum
    product = import_module("stretto.kernels.triton.product").product
    a = product(x, x.t())
    b = product(a, x)
    return (column_sum(b),)


def close(got, wanted):
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)


def draw(device, seed=0, n=8):
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(seed)).to(device)


def test_played_with_other_inputs(tape, csr, device):
    for call in range(5):
        x = draw(device, call)
        (got,) = tape.run(tape.kept_with(csr), "sums", doubled_sums, (x,))
        close(got, ((x.double() @ x.double().t()) @ x.double()).sum(0))
    (kept,) = csr.cache["tapes"].values()
    assert type(kept) is tape.Tape


def test_a_signature_is_what_launches_depend_on(tape, csr, device):
    for n in (8, 8, 8, 12, 12, 12):
        x = draw(device, n=n)
        (got,) = tape.run(tape.kept_with(csr), "sums", doubled_sums, (x,))
        close(got, ((x.double() @ x.double().t()) @ x.double()).sum(0))
    assert len(csr.cache["tapes"]) == 2


def test_what_torch_does_to_data_is_not_recorded(tape, csr, device):
    product = import_module("stretto.kernels.triton.product").product

    def function(x):
        return (product(x + 1, x.t()),)  # x + 1 would be the recorded call's for ever

    for call in range(6):
        x = draw(device, call)
        (got,) = tape.run(tape.kept_with(csr), "plus", function, (x,))
        close(got, (x.double() + 1) @ x.double().t())
    assert list(csr.cache["tapes"].values()) == [tape.TRIES + 1]


def test_inputs_that_overlap_are_not_recorded(tape, csr, device):
    product = import_module("stretto.kernels.triton.product").product
    x = draw(device)
    for _ in range(2):
        tape.run(tape.kept_with(csr), "two", lambda a, b: (product(a, b.t()),), (x, x.view(8, 8)))
    assert list(csr.cache["tapes"].values()) == [2]
    for call in range(4):  # the very same twice is another matter
        x = draw(device, call)
        (got,) = tape.run(tape.kept_with(csr), "same", lambda a, b: (product(a, b.t()),), (x, x))
        close(got, x.double() @ x.double().t())
    assert type(list(csr.cache["tapes"].values())[1]) is tape.Tape


def test_calls_of_torch_that_say_so_are_played(tape, csr, device):
    weight_grad = import_module("stretto.kernels.triton.product").weight_grad
    for call in range(4):
        x, y = draw(device, call), draw(device, call + 10)
        (got,) = tape.run(tape.kept_with(csr), "grad", lambda a, b: (weight_grad(a, b),), (x, y))
        close(got, x.double().t() @ y.double())
    assert type(*csr.cache["tapes"].values()) is tape.Tape


def test_scratch_memory_is_shared_by_what_is_not_alive_together(tape):
    def slot(size, first, last):
        return tape.Slot(0, size, first=first, last=last)

    slots = [slot(1000, 0, 1), slot(1000, 1, 2), slot(900, 2, 3), slot(100, 0, 3)]
    assert tape.plan(slots) < 2600
    for one in slots:
        for other in slots:
            if one is not other and one.first <= other.last and other.first <= one.last:
                assert one.offset + one.size <= other.offset or other.offset + other.size <= one.offset
            assert one.offset % tape.ALIGN == 0
    assert tape.plan([]) == 0
