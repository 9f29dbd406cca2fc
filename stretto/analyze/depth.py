"""From the order of ops to depth: the longest chain of ops that wait for one another.

Twice: in steps of an ideal parallel machine (log terms), and in kernel launches (what a small graph really waits for).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import sympy

from stretto.observe.costs import DEGREE
from stretto.observe.trace import Trace


@dataclass(frozen=True)
class Depth:
    """The longest chain of dependent ops."""

    steps: float  # of an ideal parallel machine
    launches: int  # kernels that wait for one another
    symbolic: str  # the chain's log terms; d is the largest in-degree, widths are numbers


def depth(
    trace: Trace,
    max_degree: int,
    *,
    symbolic: Trace | None = None,
    only: Collection[int] | None = None,
    free: Collection[int] = (),
) -> Depth:
    """Critical path over the data dependencies of the trace (numeric sizes).

    symbolic: the same trace with symbols for sizes, for the formula. only: ops that count, as those of one layer, along
    chains through all of them. free: ops that take no step, as if their results were there.
    """
    degree: Any = {DEGREE: max(max_degree, 2)}
    saved: dict[int, float] = {}
    steps: list[float] = []
    launches: list[int] = []
    before: list[int | None] = []
    counted = [(only is None or op.index in only) and op.index not in free for op in trace.ops]
    for op, counts in zip(trace.ops, counted, strict=True):
        value = op.cost.depth if counts else 0
        if isinstance(value, sympy.Expr):
            known = saved.get(id(value))
            if known is None:
                known = saved[id(value)] = float(value.subs(degree))
            value = known
        last = max(op.deps, key=lambda i: steps[i], default=None)
        steps.append(float(value) + (steps[last] if last is not None else 0.0))
        launches.append(int(counts and op.cost.family != "view") + max((launches[i] for i in op.deps), default=0))
        before.append(last)
    if not steps:
        return Depth(0.0, 0, "0")
    at: int | None = max(range(len(steps)), key=lambda i: steps[i])
    terms: Counter[Any] = Counter()
    while at is not None:
        if counted[at]:
            terms[(symbolic or trace).ops[at].cost.depth] += 1
        at = before[at]
    return Depth(max(steps), max(launches), levels(terms))


def levels(terms: Counter[Any]) -> str:
    """A sum of log terms, as "4 log d + 2 log n + 17"; logs of widths are numbers."""
    total = sympy.sympify(sum(count * term for term, count in terms.items()))
    total = sympy.expand_log(total, force=True).replace(
        lambda e: isinstance(e, sympy.log) and e.args[0].is_Symbol,
        lambda e: sympy.Symbol(f"log {e.args[0]}", positive=True) * sympy.log(2),
    )
    parts = [term.as_coeff_Mul() for term in sympy.Add.make_args(sympy.expand(total).evalf())]
    parts.sort(key=lambda part: (part[1] == 1, str(part[1])))
    shown = [
        f"{float(number):.0f}" if rest == 1 else f"{float(number):.3g} {_power(rest)}"
        for number, rest in parts
        if number
    ]
    return " + ".join(shown).replace("+ -", "- ") or "0"


def _power(term: Any) -> str:
    """Write a power: log n**2 -> (log n)^2."""
    base, exponent = term.as_base_exp()
    return str(term).replace("*", " ") if exponent == 1 else f"({base})^{float(exponent):.3g}"
