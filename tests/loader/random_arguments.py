"""The random choices of one random call: its graph, its fan-outs, and which arguments are spoilt, and how."""

import random
from typing import Any

import torch
from torch import Tensor

from stretto.loader import checks

NUMBERS = (-1, 0, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**60, 2**63 - 1, 2**63, 1.5, "2", None, True)


class Calls:
    """One call's random choices. `risk`: how often an argument is spoilt."""

    def __init__(self, seed: int, number: int) -> None:
        self.choose = random.Random(f"{seed}/{number}")
        self.torch = torch.Generator().manual_seed(self.choose.randrange(2**31))
        self.risk = self.choose.choice((0.0, 0.03, 0.1))
        self.said: list[str] = []

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, max(high, 1), shape, generator=self.torch)

    def spoil(self, name: str, value: Any) -> Any:
        """The value, or now and then something like it."""
        if self.choose.random() >= self.risk:
            return value
        ways = NUMBER if isinstance(value, (int, float)) else TENSOR
        way = self.choose.choice(sorted(ways))
        if isinstance(value, Tensor) and not checks.is_whole(value):
            return value  # torch reads what is no longer there
        self.said.append(f"{name}: {way}")
        return ways[way](self, value)


def _gone(calls: Calls, x: Tensor) -> Tensor:
    x = x.clone()
    x.untyped_storage().resize_(x.untyped_storage().nbytes() // 2)
    return x


def _set(value: int) -> Any:
    def change(calls: Calls, x: Tensor) -> Tensor:
        out = x.clone()
        if out.numel():
            out.view(-1)[calls.choose.randrange(out.numel())] = value
        return out

    return change


NUMBER = {"another": lambda calls, value: calls.choose.choice(NUMBERS)}
TENSOR = {
    "shorter": lambda calls, x: x[: len(x) // 2],
    "longer": lambda calls, x: torch.cat([x, x]),
    "every second, of twice": lambda calls, x: torch.cat([x, x])[::2],
    "strided": lambda calls, x: x.repeat_interleave(2, dim=-1)[..., ::2],  # the same values
    "transposed": lambda calls, x: x.t().contiguous().t() if x.dim() == 2 else x,  # the same values
    "more columns": lambda calls, x: x.unsqueeze(-1).expand(*x.shape, 2),
    "expanded": lambda calls, x: x[:1].expand(x.shape) if len(x) else x,
    "scalar": lambda calls, x: torch.tensor(3),
    "float": lambda calls, x: x.float(),
    "double": lambda calls, x: x.double(),
    "int8": lambda calls, x: x.to(torch.int8),
    "int16": lambda calls, x: x.to(torch.int16),
    "int32": lambda calls, x: x.to(torch.int32),
    "bool": lambda calls, x: x.bool(),
    "complex": lambda calls, x: x.to(torch.complex64),
    "conjugate": lambda calls, x: x.to(torch.complex64).conj(),
    "meta": lambda calls, x: x.to("meta"),
    "sparse": lambda calls, x: x.to_sparse(),
    "gone": _gone,
    "-1": _set(-1),
    "100": _set(100),
    "large": _set(2**31 - 1),
    "none": lambda calls, x: None,
    "list": lambda calls, x: x.tolist(),
    "reversed": lambda calls, x: x.flip(0),
}


def a_graph(calls: Calls) -> tuple[int, Tensor]:
    n = calls.choose.choice((1, 5, 40, 300))
    return n, calls.integers(n, 2, calls.choose.choice((0, 7, 200, 3000)))


def right(condition: Any, what: str) -> None:
    if not bool(condition):
        raise AssertionError(f"not refused, and wrong: {what}")


def fan_outs(calls: Calls) -> list[Any]:
    return [
        calls.spoil("num_neighbors", calls.choose.choice((-1, 0, 3, 10))) for _ in range(calls.choose.randrange(1, 3))
    ]
