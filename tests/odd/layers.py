"""Every layer, stock and accelerated, with odd inputs: `python -m tests.odd.layers FIRST [SEED COUNT]` writes one line
for every case before it runs and one after, so that a crash names its case."""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from stretto.errors import IndexRangeError, StrettoError
from tests.layers.inputs import Data, flat
from tests.layers.options import SPECS
from tests.layers.test_convs import data_for, name_of, pair_of
from tests.odd.changes import BROKEN, change_of, leaves, replaced
from tests.odd.running import Case, main

PARAMETERS: dict[str, Callable[[Tensor], Tensor]] = {
    "on meta": lambda p: p.to("meta"),
    "as float16": lambda p: p.half(),
    "as float32": lambda p: p.float(),
    "columns first": lambda p: p.t().contiguous().t() if p.dim() == 2 else p,
    "one for all": lambda p: p.flatten()[:1].expand(p.numel()).reshape(p.shape) if p.numel() else p,
    "a row less": lambda p: p[:-1],
    "as complex": lambda p: p.to(torch.cdouble),
}
SIZES = ((5, 2), (-1, -1), (12, -3), (3, 12), (12, 3), (2**40, 12), (12, None), (12.0, 12), (100, 100), (None, None))


TIES = (pyg.EdgeConv, pyg.PNAConv)  # among equal messages rounding decides which is the largest


def outcome(conv: Any, args: Any, kwargs: Any) -> Any:
    """Results and gradients (None where there is none), or the error."""
    given = [t for _, t in leaves((args, kwargs)) if t.is_floating_point() and t.layout == torch.strided]
    inputs = [t for t in given if not t.is_quantized and t.is_leaf]
    parameters = [p for p in conv.parameters() if p.requires_grad]
    torch.manual_seed(2)
    wanted = [t.requires_grad for t in inputs]
    try:
        for t in inputs:
            t.requires_grad_()
        results = flat(conv(*args, **kwargs))
        learned = [r for r in results if r.requires_grad and r.is_floating_point()]
        if not learned:
            return [*results], []
        total = sum(
            (r * torch.linspace(0.1, 1, r.numel(), dtype=r.dtype).view(r.shape).to(r.device)).sum() for r in learned
        )
        grads = torch.autograd.grad(total, [*inputs, *parameters], allow_unused=True)  # type: ignore[arg-type]
        return [r.detach() for r in results], list(grads)
    except Exception as error:  # compared with stock's own
        return error
    finally:
        for t, learns in zip(inputs, wanted, strict=True):
            t.requires_grad_(learns)


def difference(wanted: Any, got: Any, rtol: float = 0.0) -> str:
    """What is wrong with ours beside stock's, or nothing."""
    if isinstance(got, IndexRangeError):
        return ""  # stock may read the row of another type, or the last one
    if isinstance(wanted, Exception):
        if isinstance(got, (StrettoError, type(wanted))) or "not implemented for '" in str(wanted):
            return ""  # torch has no such kernel for 16 bits, ours may
        return f"stock raises {type(wanted).__name__}: {str(wanted)[:150]!r}, ours gives {_told(got)}"
    if isinstance(got, Exception):
        return f"stock gives {_told(wanted)}, ours raises {type(got).__name__}: {str(got)[:300]!r}"
    for part, mine, theirs in zip(("result", "gradient"), got, wanted, strict=True):
        if len(mine) != len(theirs):
            return f"{len(mine)} {part}s, stock {len(theirs)}"
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            told = _differ(a, b, rtol)
            if told:
                return f"{part} {i}: {told}"
    return ""


def _differ(a: Any, b: Any, rtol: float) -> str:
    if a is None or b is None:
        return "" if a is b else f"{_told(a)} where stock has {_told(b)}"
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return f"{_told(a)} where stock has {_told(b)}"
    if a.is_meta or not a.numel():
        return ""
    rtol = max(rtol, {torch.float64: 1e-9, torch.float32: 2e-4}.get(a.dtype, 6e-2))
    scale = float(b.detach().abs().double().nan_to_num(0, 0, 0).max()) if b.dtype != torch.bool else 1.0
    try:
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * max(scale, 1e-3), equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())[:200]
    return ""


def _told(value: Any) -> str:
    if isinstance(value, Exception):
        return f"{type(value).__name__}: {str(value)[:200]!r}"
    if isinstance(value, Tensor):
        return f"{str(value.dtype)[6:]} {list(value.shape)} on {value.device}"
    return "None" if value is None else f"[{', '.join(map(_told, value[0]))}]" if isinstance(value, tuple) else "?"


def _checked(
    spec: Any,
    options: Any,
    kind: str,
    data: Data,
    spoil: Callable[[Any], None] = lambda conv: None,
    stocks: Data | None = None,
    dtype: torch.dtype = torch.float64,
    where: Any = None,
) -> str:

    stock, fast = pair_of(spec, options, kind, dtype)
    spoil(stock), spoil(fast)
    types = [t.dtype for t in (*(t for _, t in leaves((data.args, data.kwargs))), *stock.parameters())]
    rtol = max({torch.float32: 2e-4, torch.float16: 6e-2, torch.bfloat16: 6e-2}.get(dtype, 0.0) for dtype in types)
    with warnings.catch_warnings(), where or contextlib.nullcontext():
        warnings.simplefilter("ignore")
        got = outcome(fast, data.args, data.kwargs)
        told = ""
        for calls in (stocks, data, data):  # twice: stock that differs from itself reads what nobody has written
            told = difference(outcome(stock, calls.args, calls.kwargs), got, rtol) if calls else told
            if calls and not told:
                break
        again = [outcome(stock, data.args, data.kwargs) for _ in range(2)] if told else []
        return "" if again and difference(*again, rtol) else told


def _spoiled(make: Callable[[Tensor], Tensor], which: Callable[[int], bool]) -> Callable[[Any], None]:
    def spoil(conv: Any) -> None:
        owners = [(m, n) for m in conv.modules() for n, p in m._parameters.items() if p is not None]
        for i, (module, name) in enumerate(owners):
            if which(i):
                module._parameters[name] = torch.nn.Parameter(make(module._parameters[name].detach()))

    return spoil


def cases_of(conv: type, options: Any, graph: str, kind: str) -> Iterator[Case]:
    """Every odd form of every tensor of a call, of every parameter, of its size; and everything on meta, or fake."""
    spec = SPECS[conv]
    name = f"{conv.__name__} {name_of(options)} {graph} {kind}"

    def data(dtype: torch.dtype = torch.float64) -> Data:
        return data_for(spec, options, graph, kind, dtype)

    for at, tensor in leaves((data().args, data().kwargs)):
        if tensor.layout != torch.strided:
            continue
        for what in change_of(tensor):
            if (what == "one row for all" and conv in TIES) or (what == "an EdgeIndex" and conv is pyg.SuperGATConv):
                continue  # of an EdgeIndex PyG's SuperGATConv dies as it samples

            def changed(at: Any = at, what: str = what) -> str:
                args, kwargs = data().args, data().kwargs
                tensor = dict(leaves((args, kwargs)))[at]
                try:
                    new = change_of(tensor)[what](tensor)
                except (RuntimeError, IndexError, TypeError, ValueError):
                    return ""  # such a tensor has no such form
                other = tensor if what == "as int32" else new  # torch's own gradient is wrong with indices of 32 bits
                given, usual = replaced((args, kwargs), at, new), replaced((args, kwargs), at, other)
                return _checked(spec, options, kind, Data(*given), stocks=Data(*usual))

            yield f"{name}: {at} {what}", changed
        if (
            "csr" in spec.takes
            and kind == "plain"
            and "flow" not in options
            and len(leaves(data().args)) == 2
            and not tensor.is_floating_point()
        ):
            for what, make in BROKEN.items():

                def broken(at: Any = at, make: Any = make) -> str:
                    args, kwargs = data().args, data().kwargs
                    fast = pair_of(spec, options, kind)[1]
                    args, kwargs = replaced((args, kwargs), at, make(dict(leaves((args, kwargs)))[at]))
                    got = outcome(fast, args, kwargs)
                    return "" if isinstance(got, StrettoError) else f"wanted a StrettoError, got {_told(got)}"

                yield f"{name}: {at} {what}", broken
    for i in range(len(list(pair_of(spec, options, kind)[0].parameters()))):
        for what, make in PARAMETERS.items():
            spoil = _spoiled(make, lambda k, i=i: k == i)
            yield f"{name}: parameter {i} {what}", lambda s=spoil: _checked(spec, options, kind, data(), s)
        for every in (False, True):
            spoil = _spoiled(lambda p: p.double(), lambda k, i=i, every=every: every or k == i)
            yield (
                f"{name}: float32, parameter {'s' if every else i} as float64",
                lambda s=spoil: _checked(spec, options, kind, data(torch.float32), s, None, torch.float32),
            )
    for what in ("on meta", "as float16", "as float32"):
        spoil = _spoiled(PARAMETERS[what], lambda i: True)
        yield f"{name}: all parameters {what}", lambda s=spoil: _checked(spec, options, kind, data(), s)

    def moved(device: str, spoil: Callable[[Any], None]) -> str:
        args, kwargs = data().args, data().kwargs
        for at, tensor in leaves((args, kwargs)):
            args, kwargs = replaced((args, kwargs), at, tensor.to(device))
        return _checked(spec, options, kind, Data(args, kwargs), spoil)

    yield f"{name}: all on meta", lambda: moved("meta", lambda conv: conv.to("meta"))
    yield f"{name}: all inputs on meta", lambda: moved("meta", lambda conv: None)

    def fake(inputs: bool) -> str:
        given = data()
        stock, fast = pair_of(spec, options, kind)
        mode = FakeTensorMode(allow_non_fake_inputs=not inputs)
        args, kwargs = given.args, given.kwargs
        if inputs:
            for at, tensor in leaves((args, kwargs)):
                args, kwargs = replaced((args, kwargs), at, mode.from_tensor(tensor))
            for conv in (stock, fast):
                for module in conv.modules():
                    for key, p in module._parameters.items():
                        if p is not None:
                            module._parameters[key] = torch.nn.Parameter(mode.from_tensor(p.detach()))
        with mode:
            wanted = outcome(stock, args, kwargs)
            got = outcome(fast, args, kwargs)
        shapes = [
            r if isinstance(r, Exception) else tuple([t if t is None else t.to("meta") for t in part] for part in r)
            for r in (wanted, got)
        ]
        return difference(*shapes)

    yield (
        f"{name}: with meta as default device",
        lambda: _checked(spec, options, kind, data(), where=torch.device("meta")),
    )
    yield f"{name}: all fake", lambda: fake(True)
    yield f"{name}: under a fake mode", lambda: fake(False)
    if kind in ("pair_none", "size", "pair", "plain"):
        for size in SIZES:
            yield (
                f"{name}: size {size}",
                lambda size=size: _checked(
                    spec, options, kind, replace(data(), kwargs={**data().kwargs, "size": size})
                ),
            )


def table() -> list[Case]:
    """Every layer with its usual options and its usual input, and as two ends and sizes where it takes them."""
    found: list[Case] = []
    for conv, spec in SPECS.items():
        for kind in dict.fromkeys((spec.takes[0], *(k for k in spec.takes if k in ("pair_none", "weight", "typed")))):
            found += cases_of(conv, spec.options[0], "unsorted", kind)
        edged = next((o for o in spec.options if "edge_dim" in o), None)
        if edged is not None:
            found += cases_of(conv, edged, "unsorted", spec.takes[0])
    return found


def drawn(seed: int, count: int) -> list[Case]:
    """As many cases of any options, graphs and inputs."""
    draw = random.Random(seed)
    found: list[Case] = []
    while len(found) < count:
        conv = draw.choice(list(SPECS))
        spec = SPECS[conv]
        kind = draw.choice(spec.takes)
        options = draw.choice(spec.options)
        if kind == "pair" and spec.pair is not None:
            options = {k: v for k, v in options.items() if k not in ("out", "nn")}
        if options.get("K") == 1 and conv is pyg.ChebConv:
            continue  # reads no edges, whatever they are
        if kind.endswith("_values") and options.get("aggr") in ("max", "min"):
            continue  # of a sparse matrix, stock gives one of equal messages the whole gradient
        graph = draw.choice(("unsorted", "empty", "one_node", "no_nodes", "isolated", "hub"))
        found += draw.sample(every := list(cases_of(conv, options, graph, kind)), min(8, len(every)))
    return found


if __name__ == "__main__":
    main(table, drawn, sys.argv[1:])
