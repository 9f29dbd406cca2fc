"""Every op with odd arguments, and every way to make a Graph with odd arrays: `python -m tests.odd.ops FIRST`.

Either an op computes what its reference does, or it raises: a StrettoError, or what torch itself raises for a tensor
that is a list or text. What the reference cannot compute must not come out either, but where types are promoted.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from stretto import Graph
from stretto.errors import StrettoError
from stretto.ops import OPS, Sample
from tests.graphs import graph_of, random_edges
from tests.odd.changes import BROKEN, FAR, INDICES, VALUES, Change
from tests.odd.running import Case, main

# Of an index [E] of an op, and of a vector of pointers.
VECTORS: dict[str, Change] = {
    **{f"as {dtype}".replace("torch.", ""): lambda t, dtype=dtype: t.to(dtype) for dtype in (torch.int16, torch.uint8)},
    "falling": lambda t: t.flip(0),
    "a number too far": lambda t: torch.cat([t[:-1], t[-1:] + (FAR if t.dtype == torch.int64 else 2**30)]),
    "a negative number": lambda t: torch.cat([t[:-1], -t[-1:] - 1]),
    **{
        k: INDICES[k]
        for k in ("on meta", "as float32", "as bool", "learned", "as complex64", "an array", "a list", "None")
    },
    **{k: VALUES[k] for k in ("every second column", "a row less", "a row more", "no rows", "a dimension more")},
    **{k: VALUES[k] for k in ("a number", "sparse", "text", "one row for all", "of a class of its own", "a parameter")},
}
PLAINLY = (TypeError, AttributeError)  # Python's own, for what is no tensor at all


def _result(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*args, **kwargs)
    except Exception as error:  # compared
        return error


def _types(args: Any, kwargs: Any) -> set[torch.dtype]:
    values = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    return {v.dtype for v in values if v.is_floating_point() or v.is_complex()}


def _judged(op: Any, args: Any, kwargs: Any, odd: Any) -> str:
    got = _result(op.function, args, kwargs)
    if isinstance(got, StrettoError) or (isinstance(got, PLAINLY) and not isinstance(odd, Tensor)):
        return ""
    if isinstance(got, Exception):
        return f"raises {type(got).__name__}: {str(got)[:200]!r}"
    if any(isinstance(a, Tensor) and a.is_meta for a in args):
        return "" if got.is_meta else f"gives {got.dtype} on {got.device} from a tensor on meta"
    wanted = _result(op.reference, args, kwargs)
    if isinstance(wanted, Exception) and len(_types(args, kwargs)) > 1:
        return ""  # ours promotes
    if isinstance(wanted, Exception):
        return f"gives a result where its reference raises {type(wanted).__name__}: {str(wanted)[:200]!r}"
    types = _types(args, kwargs)
    rtol = 5e-2 if types & {torch.float16, torch.bfloat16} else 1e-4 if torch.float32 in types else 1e-8
    if got.shape != wanted.shape:
        return f"gives {list(got.shape)} where its reference gives {list(wanted.shape)}"
    got, wanted = (t.dequantize() if t.is_quantized else t for t in (got, wanted))
    near = torch.allclose(got.double(), wanted.double(), rtol=rtol, atol=rtol, equal_nan=True)
    return "" if near else f"differs by {float((got.double() - wanted.double()).abs().max())}"


def _samples(name: str) -> list[Sample]:
    torch.manual_seed(3)
    return list(OPS[name].samples(graph_of("unsorted"), torch.float64))


def _cases_of(name: str) -> list[Case]:
    found: list[Case] = []
    for number, sample in enumerate(_samples(name)):
        places = [("args", i, a) for i, a in enumerate(sample.args)] + [
            ("kwargs", k, v) for k, v in sample.kwargs.items()
        ]
        for where, at, value in places:
            if isinstance(value, Tensor):
                changes = VALUES if value.is_floating_point() else VECTORS
            elif isinstance(value, (int, float, list)) and not isinstance(value, bool):
                changes = {
                    f"{v!r}": lambda t, v=v: v for v in (-1, 2**62, "x", None, [3, -1, 12], 2.5, [], [0, FAR, 12])
                }
            else:
                continue
            for what, make in changes.items():

                def changed(where: str = where, at: Any = at, make: Any = make, number: int = number) -> str:
                    op, sample = OPS[name], _samples(name)[number]
                    args, kwargs = list(sample.args), dict(sample.kwargs)
                    holder: Any = args if where == "args" else kwargs
                    try:
                        holder[at] = odd = make(holder[at])
                    except (RuntimeError, IndexError, TypeError, ValueError):
                        return ""  # such a value has no such form
                    if what_is_fine(name, at, odd):
                        return ""
                    return _judged(op, args, kwargs, odd)

                found.append((f"{name} {number} ({sample}): {at} {what}", changed))
    return found


def what_is_fine(name: str, at: Any, odd: Any) -> bool:
    """What an op takes and its reference does not, or without harm: an argument that is left out, a scale of zeros."""
    return odd is None or (name in ("spmm", "softmax_sum") and isinstance(odd, (int, float)))


def _raises(make: Callable[[], Any], *also: type[Exception]) -> Callable[[], str]:
    def check() -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = _result(make, (), {})
        return "" if isinstance(got, (StrettoError, *also)) else f"wanted a StrettoError, got {got!r}"

    return check


def _graphs() -> list[Case]:
    edges = random_edges(12, 12, 50, 6)
    right = Graph.of(edges, 12).csr
    rowptr, col, ids = right.rowptr, right.col, right.edge_id
    assert col is not None
    assert ids is not None
    found: list[Case] = []
    refused = ("on meta", "as int16", "as float32", "as bool", "as complex64", "learned", "negative", "very negative")
    refused += (
        "one too far",
        "too far",
        "far",
        "as far as can be",
        "three rows",
        "one row",
        "flat",
        "a class of its own",
    )
    refused += ("a dimension more", "an array", "a list", "None", "sparse")
    for what in refused:
        odd = INDICES[what]
        found.append((f"Graph.of: edges {what}", _raises(lambda odd=odd: Graph.of(odd(edges), 12))))
    for what, broken in BROKEN.items():
        for sizes in (None, 12, (12, 12)):
            found.append((f"Graph.of: {what}, {sizes}", _raises(lambda b=broken, s=sizes: Graph.of(b(edges), s))))
    for sizes in (
        -1,
        2**62,
        2.5,
        "x",
        (12,),
        (12, 12, 12),
        (-1, 12),
        (12, 2.0),
        torch.tensor(2.5),
        [None, -3],
        (3, 12),
    ):
        found.append((f"Graph.of: num_nodes {sizes!r}", _raises(lambda s=sizes: Graph.of(edges, s))))
        if not isinstance(sizes, (tuple, list)):
            found.append((f"of_segments: {sizes!r}", _raises(lambda s=sizes: Graph.of_segments(edges[0], s))))
    for what in ("as int16", "as uint8", "a number too far", "a negative number", "on meta", "as float32", "an array"):
        odd = VECTORS[what]
        found.append((f"of_segments: index {what}", _raises(lambda o=odd: Graph.of_segments(o(edges[0]), 12))))
    arrays = {"rowptr": rowptr, "col": col, "edge_id": ids}
    for name in arrays:
        for what, odd in VECTORS.items():
            if what == "falling" and name != "rowptr":
                continue  # any order of columns is a matrix
            if (what in ("a parameter", "None") and name != "rowptr") or (what == "a row more" and name == "rowptr"):
                continue  # no columns: entry e has column e; a row without entries
            if what == "one row for all" and name == "col":
                continue

            def pointers(name: str = name, odd: Any = odd) -> Graph:
                given = {**arrays, name: odd(arrays[name])}
                return Graph.of_pointers(given["rowptr"], given["col"], 12, edge_id=given["edge_id"])

            found.append((f"of_pointers: {name} {what}", _raises(pointers)))
    for count in (-1, 3, 2**62, 2.5, "x", None):
        made = lambda c=count: Graph.of_pointers(rowptr, col, c)  # noqa: E731
        found.append((f"of_pointers: num_cols {count!r}", _raises(made)))

    def fake() -> Any:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return Graph.of(edges.clone() + 0, 12)

    found.append(("Graph.of under a FakeTensorMode", _raises(fake)))
    return found


def table() -> list[Case]:
    """Every argument of every sample of every op, and every way to make a graph."""
    return [case for name in OPS for case in _cases_of(name)] + _graphs()


def drawn(seed: int, count: int) -> list[Case]:
    """Some of them."""
    return random.Random(seed).sample(table(), count)


if __name__ == "__main__":
    main(table, drawn, sys.argv[1:])
