"""What attention asks of its arguments: the tensors of each form, their shapes, their types, and the seed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from stretto.errors import expect, fail
from stretto.graph import Graph
from stretto.kernels.attention import FORMS, TENSORS
from stretto.kernels.schema import CPU
from stretto.ops.checks import check_values

# The tensors of each form beside v, by their sizes: n rows, m columns, E edges, h heads, k of a score, d of attr.
SHAPES: dict[str, dict[str, tuple[str, ...]]] = {
    "gat": {"left": ("nh",), "right": ("mh",), "edge": ("Eh",)},
    "given": {"edge": ("Eh",)},
    "weight": {"edge": ("Eh",)},
    "gatv2": {"left": ("nhk",), "right": ("mhk",), "edge": ("Ehk",), "att": ("hk",)},
    "dot": {"left": ("nhk",), "right": ("mhk", "m1k"), "attr": ("Ed",), "query": ("nhd",)},
}
REQUIRED = {"gat": ("right",), "gatv2": ("right", "att"), "dot": ("right",)}
# The arrays of rows, which share one storage type; everything else is scalars, held in the accumulation type.
_ROWS = {
    "gat": ("v",),
    "given": ("v",),
    "weight": ("v",),
    "gatv2": ("v", "left", "right", "edge"),
    "dot": ("v", "left", "right", "attr", "query"),
}


def promoted(graph: Graph, form: str, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Rows of mixed types meet in the widest, as in torch's own arithmetic; raises for what no kernel reads."""
    expect(form in FORMS, f"attention: 'form' is {form!r}, wanted one of {', '.join(FORMS)}")
    named = dict(zip(TENSORS, tensors, strict=True))
    for name, tensor in named.items():
        if tensor is not None:
            check_values("attention", name, tensor, graph.device)
    types = {t.dtype for name, t in named.items() if t is not None and name in _ROWS[form]}
    if len(types) <= 1:
        return tensors
    wide = torch.float64 if torch.float64 in types else torch.float32
    return tuple(t.to(wide) if t is not None and name in _ROWS[form] else t for name, t in named.items())


def default_scale(form: str, left: Tensor | None) -> float:
    """1 / sqrt(k) of a dot product."""
    return 1 / math.sqrt(left.size(2)) if form == "dot" and left is not None and left.dim() == 3 and left.size(2) else 1


def check_numbers(**numbers: Any) -> None:
    """Raise unless these are numbers."""
    for name, number in numbers.items():
        if not isinstance(number, (int, float)):
            fail(f"attention: '{name}' is {number!r}, wanted a number")
    if not 0 <= numbers["dropout"] <= 1:
        fail(f"attention: 'dropout' is {numbers['dropout']}, wanted 0 to 1")


def check(graph: Graph, form: str, tensors: tuple[Tensor | None, ...]) -> None:
    """Raise unless the tensors are those of the form."""
    named = dict(zip(TENSORS, tensors, strict=True))
    sizes = _sizes(graph, form, named)
    for name, tensor in named.items():
        if tensor is None:
            if name in REQUIRED.get(form, ()):
                fail(f"attention: form {form!r} wants '{name}'")
        elif name != "v":
            if name not in SHAPES[form]:
                fail(f"attention: form {form!r} takes no '{name}'")
            for shape in SHAPES[form][name]:
                if tuple(tensor.shape) == tuple(map(sizes.__getitem__, shape)):
                    break
            else:
                wanted = [sizes[letter] for letter in SHAPES[form][name][0]]
                fail(f"attention: '{name}' has shape {list(tensor.shape)}, wanted {wanted}")
    if named["query"] is not None and named["attr"] is None:
        fail("attention: 'query' comes without 'attr', whose product it would be")


def _sizes(graph: Graph, form: str, named: dict[str, Tensor | None]) -> dict[str, int]:
    """The number behind each letter of SHAPES."""
    values, num_cols = named["right"] if named["v"] is None else named["v"], graph.num_cols
    if values is None or values.dim() != 3 or values.size(0) != num_cols:
        got = "absent" if values is None else f"of shape {list(values.shape)}"
        fail(f"attention: 'v' is {got}, wanted [{num_cols}, heads, width], one row per column of the graph")
    name, dims = ("edge" if form in ("given", "weight") else "left"), 3 if form in ("gatv2", "dot") else 2
    lead = named[name]
    if lead is None or lead.dim() != dims:
        fail(f"attention: form {form!r} wants '{name}' of {dims} dimensions")
    heads, attr = lead.size(1), named["attr"]
    if values.size(1) not in (1, heads):
        fail(f"attention: 'v' has {values.size(1)} heads, wanted {heads} as '{name}', or 1")
    width = lead.size(2) if dims == 3 else 0
    sizes = {"n": graph.num_rows, "m": num_cols, "E": graph.num_edges, "h": heads, "k": width, "1": 1}
    return {**sizes, "d": attr.size(1) if attr is not None and attr.dim() == 2 else 0}


def seed_of(seed: Tensor | int | None, device: torch.device) -> Tensor:
    """The seed as a tensor of one int64, drawn where none is given."""
    if seed is None:
        return torch.randint(2**63 - 1, (1,), device=device)
    if isinstance(seed, Tensor):
        known = seed.dtype == torch.int64 and seed.numel() == 1 and seed.device in (device, CPU)
        expect(known, f"attention: 'seed' is {seed.dtype} {list(seed.shape)} on {seed.device}, wanted one int64")
        return seed.reshape(1)
    known = isinstance(seed, int) and -(2**63) <= seed < 2**64
    expect(known, f"attention: 'seed' is {seed!r}, wanted an integer of 64 bits, or a tensor of one")
    return torch.tensor([seed if seed < 2**63 else seed - 2**64], device=CPU)  # torch.initial_seed() has no sign
