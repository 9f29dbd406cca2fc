"""Options of a layer's constructor that users flip between its calls: it computes what stock does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.layers.options import SPECS
from tests.layers.spec import Spec
from tests.layers.test_convs import data_for, pair_of, run


def plain(layer: Any) -> dict[str, Any]:
    """The options that a layer keeps as they are."""
    kinds = (bool, int, float, str, type(None))
    own = {k: v for k, v in vars(layer).items() if isinstance(v, kinds) and not k.startswith("_") and k != "training"}
    return own | {name: module for name, module in layer.named_children() if name == "aggr_module"}


def shapes(layer: Any) -> dict[str, Any]:
    return {name: value.shape for name, value in layer.state_dict().items()}


def flips(spec: Spec) -> list[tuple[Any, Any]]:
    every = [*spec.options, *spec.declined]
    first = [(spec.options[0], other) for other in every[1:]]
    return first + [(other, spec.options[0]) for other in spec.options[1:]]


@pytest.mark.parametrize("conv", SPECS, ids=lambda c: c.__name__)
def test_options_flipped_between_calls(conv):
    spec = SPECS[conv]
    for before, after in flips(spec):
        other = pair_of(spec, after)[0]
        layers, wanted = pair_of(spec, before), plain(other)
        if shapes(layers[0]) != shapes(other) or plain(layers[0]).keys() != wanted.keys():
            continue
        data = data_for(spec, before, "unsorted", spec.takes[0])
        results = []
        for layer in layers:
            layer.eval()
            with torch.no_grad():
                layer(*data.args, **data.kwargs), layer(*data.args, **data.kwargs)
            for name, value in wanted.items():
                setattr(layer, name, value)
            results.append(run(layer, data))
        stock, ours = results
        if isinstance(stock, Exception):
            assert isinstance(ours, type(stock)), (before, after, stock, ours)
            continue
        if isinstance(ours, Exception):
            raise ours
        assert len(ours) == len(stock)
        for a, b in zip(ours, stock, strict=True):
            assert isinstance(b, Tensor)
            scale = float(b.abs().nan_to_num(0, 0).max()) if b.numel() else 0.0
            torch.testing.assert_close(
                a, b, rtol=spec.rtol, atol=spec.rtol * max(scale, 1e-3), equal_nan=True, msg=f"{before} -> {after}"
            )
