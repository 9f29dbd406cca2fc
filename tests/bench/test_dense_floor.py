"""The floor of a step is made of exactly its dense products."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.suites.dense_floor import _Record, dense_floor


def flops(call) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_the_products_of_a_training_step_and_nothing_else():
    torch.manual_seed(0)
    x = torch.randn(7, 3)
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))

    def step() -> None:
        net(x).sum().backward()

    floor = dense_floor(step)
    assert floor is not None
    # forward twice, both weights, and the gradient of the hidden values
    assert flops(floor) == flops(step) == 2 * 7 * (2 * 3 * 5 + 3 * 5 * 2)


def test_accumulating_products_count():
    total, left, right = torch.zeros(4, 3), torch.randn(5, 4).t(), torch.randn(5, 3)
    floor = dense_floor(lambda: total.addmm_(left, right))
    assert floor is not None
    with _Record() as record:
        floor()
    assert [(x.shape, x.stride(), w.shape, adds) for x, w, adds in record.calls] == [((4, 5), (1, 4), (5, 3), True)]


def test_a_step_without_products_has_no_floor():
    assert dense_floor(lambda: torch.ones(3).sum()) is None


def test_products_into_given_memory_count():
    bias, left, right = torch.zeros(3), torch.randn(4, 5), torch.randn(5, 3)

    def step() -> None:
        torch.mm(left, right, out=torch.empty(4, 3))
        torch.addmm(bias, left, right, out=torch.empty(4, 3))

    floor = dense_floor(step)
    assert floor is not None
    assert flops(floor) == 2 * 2 * 4 * 5 * 3
