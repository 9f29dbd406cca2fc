"""Whether attention may add a layer's bias on its way, before the result is written.

Backward wants the result without the bias and takes it off again: g . ((out + bias) - bias). What that costs in digits
is a rounding of the bias, against roundings of the values in everything else; so a bias that is larger than the values,
or not finite, is added afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from stretto.kernels import backend, on_host
from stretto.ops.autograd_state import saved_elsewhere
from stretto.recording import recorder

ROWS = 16  # of the values that are looked at
EVERY = 256  # calls between two looks on a device, where the host would wait for each; at first more often


@dataclass
class _Seen:
    calls: int = 0
    larger: bool = False


_seen: MutableMapping[Tensor, _Seen] = WeakIdKeyDictionary()


def takes_bias(tensors: tuple[Tensor | None, ...], bias: Tensor, learns: bool) -> bool:
    """Whether a kernel adds the bias on its way. The result, which backward reads, is then in the caller's hands."""
    if saved_elsewhere():
        return False
    values = tensors[2] if tensors[0] is None else tensors[0]
    assert values is not None
    if bias.shape != (values.size(1) * values.size(2),):  # one number for all, or a row for every node: torch's to add
        return False
    widest = backend(values.device).bias_width
    if values.size(2) > widest or bias.dtype != values.dtype or values.dtype not in (torch.float32, torch.float64):
        return False
    return not learns or not larger(bias, lambda: some_rows(values))


def some_rows(x: Tensor) -> Tensor:
    """A few rows from all over x."""
    return x.detach()[:: max(x.size(0) // ROWS, 1)]


def larger(bias: Tensor, values: Callable[[], Tensor]) -> bool:
    """Whether the bias is larger than some of the values it is added to, or not finite."""
    if recorder.program is not None:
        return True  # a step that is written down looks at no values: its bias is added afterwards
    if on_host(bias):
        return _compare(bias, values)
    seen = _seen.get(bias)
    if seen is None:
        seen = _seen[bias] = _Seen()
    due = (
        seen.calls & (seen.calls - 1)
    ) == 0 or seen.calls % EVERY == 0  # calls 0, 1, 2, 4, 8, ... and then each 256th
    if due and not torch.cuda.is_current_stream_capturing():
        seen.larger = _compare(bias, values)
    seen.calls += 1
    return seen.larger


def _compare(bias: Tensor, values: Callable[[], Tensor]) -> bool:
    most = float(_largest(bias.detach()))
    return most != 0 and not most <= float(_largest(values()))


def _largest(x: Tensor) -> Tensor:
    return x.abs().max() if x.numel() else x.new_zeros(())
