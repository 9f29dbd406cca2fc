"""Every accelerated layer against the untouched one: adversarial graphs, every constructor option, train and eval,
outputs and all gradients; and what is not described runs as stock, with a reason."""

from __future__ import annotations

import copy
import functools
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import stretto
from stretto.layers import CONVS, record_of
from tests.compare import judge
from tests.graphs import ZOO
from tests.layers.inputs import INPUTS, Data, flat, gradients_of
from tests.layers.options import SPECS
from tests.layers.spec import Options, Spec

FEW = ("unsorted", "isolated")
SQUARE = ("no_nodes", "one_node", "one_loop", "empty", "isolated", "self_loops", "duplicates", "symmetric", "directed")


def name_of(options: Options) -> str:
    return "-".join(f"{k}={v}" for k, v in options.items() if not callable(v)) or "default"


def cases(covered: bool) -> list[Any]:
    return [
        pytest.param(conv, i, id=f"{conv.__name__}-{i}-{name_of(options)}"[:80])
        for conv, spec in SPECS.items()
        for i, options in enumerate(spec.options if covered else spec.declined)
    ]


@functools.cache
def _plain_first(make: Any) -> None:
    """PyG writes propagate() once a class, for the first instance: one that can't fuse would break those that can."""
    make()


def pair_of(spec: Spec, options: Options, kind: str = "", dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    """The untouched layer and an accelerated copy."""
    make = spec.pair if kind == "pair" and spec.pair is not None else spec.make
    _plain_first(spec.make)
    torch.manual_seed(1)
    stock = make(**dict(options)).to(dtype)
    for parameter in stock.parameters():  # no zeros as start: they would hide a wrong bias
        torch.nn.init.normal_(parameter, std=0.5)
    return stock, stretto.accelerate(copy.deepcopy(stock))


def data_for(spec: Spec, options: Options, graph: str, kind: str, dtype: torch.dtype = torch.float64) -> Data:
    if spec.edge == "auto":
        spec = replace(spec, edge="attr" if "edge_dim" in options else "")
    if options.get("use_attention"):
        kind = "hyper_attr"
    if spec.edge == "type" and spec.takes[0] == "typed":
        spec = replace(spec, edge="type" if "num_relations" in options else "")
    spec = replace(spec, width=options.get("channels", spec.width) if kind != "pair" else spec.width)
    return INPUTS[kind](graph, spec, dtype)


def run(conv: Any, data: Data) -> list[Tensor] | Exception:
    """Results and gradients, or the error."""
    torch.manual_seed(2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return gradients_of(conv, data)
    except Exception as error:  # compared with stock's own
        return error


def check(spec: Spec, options: Options, graph: str, kind: str, train: bool = True, path: str = "fast") -> None:
    stock, fast = pair_of(spec, options, kind)
    data = data_for(spec, options, graph, kind)
    wanted, got = run(stock.train(train), data), run(fast.train(train), data)
    if isinstance(wanted, Exception):
        assert isinstance(got, type(wanted)), f"stock raises {wanted!r}, ours gives {got!r}"
        return
    if isinstance(got, Exception):
        raise got
    record = record_of(fast)
    assert record.path == path, f"ran as {record.path}: {record.reason}"
    assert (record.path == "stock") == bool(record.reason)
    assert len(got) == len(wanted)
    for i, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        what = f"{'result' if i == 0 else f'value or gradient {i}'} on {graph}, {kind}"
        scale = float(theirs.abs().nan_to_num(0, 0).max()) if theirs.numel() else 0.0
        torch.testing.assert_close(
            mine,
            theirs,
            rtol=spec.rtol,
            atol=spec.rtol * max(scale, 1e-3),
            equal_nan=True,
            msg=lambda m, w=what: f"{w}: {m}",
        )
    for (name, mine), theirs in zip(fast.named_buffers(), stock.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9, equal_nan=True, msg=f"buffer {name}")


def test_every_layer_has_its_options():
    assert set(SPECS) == set(CONVS)


@pytest.mark.parametrize(("conv", "number"), cases(covered=True))
def test_option_runs_fast_and_equals_stock(conv, number):
    spec = SPECS[conv]
    for graph in FEW:
        for train in (True, False):
            check(spec, spec.options[number], graph, spec.takes[0], train)


@pytest.mark.parametrize(("conv", "number"), cases(covered=False))
def test_option_declines_with_a_reason(conv, number):
    spec = SPECS[conv]
    check(spec, spec.declined[number], "unsorted", spec.takes[0], path="stock")


@pytest.mark.parametrize("conv", SPECS, ids=lambda c: c.__name__)
def test_adversarial_graphs(conv):
    for graph in SQUARE:
        check(SPECS[conv], SPECS[conv].options[0], graph, SPECS[conv].takes[0])


@pytest.mark.parametrize(
    ("conv", "kind"), [pytest.param(c, k, id=f"{c.__name__}-{k}") for c, s in SPECS.items() for k in s.takes[1:]]
)
def test_inputs(conv, kind):
    spec = SPECS[conv]
    for options in spec.options[:3]:
        if kind == "pair" and spec.pair is not None:
            options = {k: v for k, v in options.items() if k not in ("out", "nn")}
        for graph in ("wide", "tall") if kind in ("pair", "size") else ("unsorted", "isolated", "empty"):
            check(spec, options, graph, kind)


@pytest.mark.parametrize("conv", SPECS, ids=lambda c: c.__name__)
def test_every_parameter_has_a_gradient_where_stocks_has(conv):
    """Zeros are no None: an optimizer leaves out what has none, and DistributedDataParallel waits for it."""
    spec = SPECS[conv]
    for options in spec.options:
        data = data_for(spec, options, "unsorted", spec.takes[0])
        layers = pair_of(spec, options)
        if not any(p.requires_grad for p in layers[0].parameters()) or isinstance(run(layers[0], data), Exception):
            continue
        learned = []
        for layer in layers:
            torch.manual_seed(2)
            results = [r for r in flat(layer(*data.args, **data.kwargs)) if r.requires_grad]
            torch.autograd.backward(results, [torch.ones_like(r) for r in results])
            learned.append({name for name, p in layer.named_parameters() if p.grad is not None})
        assert learned[0] <= learned[1], f"{name_of(options)}: none for {learned[0] - learned[1]}"


@pytest.mark.parametrize("conv", SPECS, ids=lambda c: c.__name__)
def test_single_precision(conv):
    """No worse than twice stock's own error against fp64."""
    spec = SPECS[conv]
    for options in spec.options[:2]:
        stock, fast = pair_of(spec, options, dtype=torch.float32)
        exact = copy.deepcopy(stock).double()
        kind = spec.takes[0]
        data = data_for(spec, options, "symmetric", kind, torch.float32)
        truth = run(exact, data.to(torch.float64))
        baseline, got = run(stock, data), run(fast, data)
        assert not isinstance(truth, Exception)
        assert not isinstance(baseline, Exception)
        if isinstance(got, Exception):
            raise got
        for i, (mine, theirs, true) in enumerate(zip(got, baseline, truth, strict=True)):
            judge(mine, theirs, true, f"{conv.__name__} {i}", terms=ZOO["symmetric"]()[0].size(1), scale=1.0)


@pytest.mark.parametrize("conv", SPECS, ids=lambda c: c.__name__)
def test_autocast(conv):
    """The types of stock's results and gradients, and values no worse than its own are."""
    spec = SPECS[conv]
    for options in spec.options:
        stock, fast = pair_of(spec, options, dtype=torch.float32)
        exact = copy.deepcopy(stock).double()
        data = data_for(spec, options, "symmetric", spec.takes[0], torch.float32)
        truth = run(exact, data.to(torch.float64))
        with torch.autocast("cpu", torch.bfloat16):
            baseline, got = run(stock, data), run(fast, data)
        if isinstance(baseline, Exception):
            assert type(got) is type(baseline), f"stock raises {baseline!r}, ours gives {got!r}"
            continue
        assert not isinstance(truth, Exception)
        if isinstance(got, Exception):
            raise got
        for i, (mine, theirs, true) in enumerate(zip(got, baseline, truth, strict=True)):
            what = f"{conv.__name__} {name_of(options)} {i}"
            assert mine.dtype == theirs.dtype, what
            scale = max(float(true.abs().nan_to_num(0, 0).max()) if true.numel() else 0.0, 1.0)
            error = [float(((t.double() - true).abs().max()) / scale) if true.numel() else 0.0 for t in (mine, theirs)]
            assert error[0] <= 2 * error[1] + 2**-7, what  # one rounding


@pytest.mark.parametrize("conv", SPECS, ids=lambda c: c.__name__)
def test_declining_leaves_the_generator_alone(conv):
    """What declines must not have drawn random numbers, nor changed the layer."""
    spec = SPECS[conv]
    for options in spec.declined:
        stock, fast = pair_of(spec, options)
        data = data_for(spec, options, "unsorted", spec.takes[0])
        run(stock, data)
        state = torch.get_rng_state()
        run(fast, data)
        assert torch.equal(torch.get_rng_state(), state)
        for key, value in fast.state_dict().items():
            torch.testing.assert_close(value, stock.state_dict()[key], equal_nan=True)


@pytest.mark.parametrize("conv", [c for c, s in SPECS.items() if s.random], ids=lambda c: c.__name__)
def test_dropout_of_attention(conv):
    """Equal in eval; fast in training, reproducible by a seed, and on average what stock gives on average."""
    spec = SPECS[conv]
    for options in spec.random:
        check(spec, options, "unsorted", spec.takes[0], train=False)
        stock, fast = pair_of(spec, options)
        data = data_for(spec, options, "unsorted", spec.takes[0])
        first, second = run(fast.train(), data), run(fast, data)
        assert record_of(fast).path == "fast"
        assert isinstance(first, list)
        assert isinstance(second, list)
        for one, other in zip(first, second, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            mine, theirs = (
                torch.stack([torch.cat([r.flatten() for r in flat(layer(*data.args))]) for _ in range(400)])
                for layer in (fast, stock.train())
            )
        error = (mine.mean(0) - theirs.mean(0)).abs()
        assert (error <= 6 * ((mine.var(0) + theirs.var(0)) / 400).sqrt() + 1e-12).all()
