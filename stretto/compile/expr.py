"""Expressions: a layer's linear algebra, written once.

A layer is a sum of terms; a term is a product of factors, for example A X W'. Factors are dense leaves (features X, a
weight W, the incoming gradient G), sparse ones (a power A^k of the adjacency) and diagonal ones (S and T, which
normalise it). Products of factors are written in no particular order of evaluation: rules.py finds all orders, cost.py
prices them, plan.py picks one. Leaves that stay the same from step to step are found when a layer runs (constants.py).
A function of single entries, such as a ReLU, ends an expression: no law moves a factor past it.

A node is a value some order of evaluation computes. Equal nodes are one value: sharing between terms, and between
forward and backward, is equality.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

Sizes = dict[str, int]


class One:
    """One object for equal values: equality is identity. To compare or hash a chain of hops link by link would take
    longer than to price it, and nodes are looked up on every call of a layer."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    _made: ClassVar[dict[tuple[Any, ...], Any]] = {}

    def __new__(cls, *values: Any, **named: Any) -> Any:
        if named or len(values) < len(cls.__dataclass_fields__):
            places = list(cls.__dataclass_fields__.values())[len(values) :]
            values = (*values, *(named.get(field.name, field.default) for field in places))
        key = (cls, *values)
        result = One._made.get(key)
        return One._made.setdefault(key, super().__new__(cls)) if result is None else result

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(self.__dict__.values())  # what is copied or read from a file is the one object, too


@dataclass(frozen=True, eq=False)
class Leaf(One):
    """A dense matrix by name, with symbolic sizes: Leaf("X", "m", "i")."""

    name: str
    rows: str
    cols: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Sparse(One):
    """A power of a sparse matrix of `rows` by `cols`; transposed tells the direction of its edges.

    form: with its normalisation, which the kernel applies (""), or which its edges hold ("edges"); or "bare"; or a
    power that is multiplied out ("formed"), whose edges hold it too (powers.py).
    chebyshev: not A^k but C_k(A), with C_1 = A, C_2 = A A - 2, C_k = A C_{k-1} - C_{k-2}: 2 T_k(L) of A = 2 L.
    """

    name: str
    rows: str
    cols: str
    power: int = 1
    transposed: bool = False
    form: str = ""
    chebyshev: bool = False

    def __str__(self) -> str:
        mark = "'" if self.transposed else ""
        text = f"{self.name}{mark}" + (f"^{self.power}" if self.power > 1 else "")
        text = f"C{self.power}({self.name}{mark})" if self.chebyshev else text
        return f"norm({text})" if self.form == "edges" else f"[{text}]" if self.form == "formed" else text


@dataclass(frozen=True, eq=False)
class Diagonal(One):
    """A diagonal matrix by name: it scales the rows of what it multiplies. S A T is what a sparse leaf A stands for."""

    name: str
    size: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Transpose(One):
    """The transpose of a dense node: a view, free of charge."""

    of: Node

    def __str__(self) -> str:
        return f"{self.of}'" if isinstance(self.of, Leaf) else f"({self.of})'"


@dataclass(frozen=True, eq=False)
class MatMul(One):
    """A product of two nodes; the left one may be sparse (of power one) or diagonal."""

    left: Factor
    right: Node

    def __str__(self) -> str:
        return f"{_bracket(self.left)} {_bracket(self.right)}"


@dataclass(frozen=True, eq=False)
class Scaled(One):
    """A node times a number known by name when the plan runs."""

    by: str
    of: Node

    def __str__(self) -> str:
        return f"{self.by} {_bracket(self.of)}"


@dataclass(frozen=True, eq=False)
class Add(One):
    """A sum of nodes."""

    terms: tuple[Node, ...]

    def __str__(self) -> str:
        return " + ".join(str(t) for t in self.terms)


@dataclass(frozen=True, eq=False)
class Horner(One):
    """terms[0] + A (terms[1] + A (terms[2] + ...)): every step is one aggregation that adds onto the next term."""

    sparse: Sparse
    terms: tuple[Node | None, ...]

    def __str__(self) -> str:
        text = ""
        for term in reversed(self.terms):
            inner = f"{self.sparse} ({text})" if text else ""
            text = " + ".join(part for part in (str(term) if term is not None else "", inner) if part)
        return text


@dataclass(frozen=True, eq=False)
class Step(One):
    """A now - before, or A now - 2 before (twice): C_k from C_{k-1} and C_{k-2}, one aggregation that subtracts."""

    sparse: Sparse
    now: Node
    before: Node
    twice: bool = False

    def __str__(self) -> str:
        hops, base = 2, self.now
        while isinstance(base, Step):
            hops, base = hops + 1, base.now
        assert isinstance(base, MatMul)
        return f"C{hops}({self.sparse}) {_bracket(base.right)}"


@dataclass(frozen=True, eq=False)
class Clenshaw(One):
    """terms[0] + A b_1 - 2 b_2 with b_k = terms[k] + A b_{k+1} - b_{k+2}: the sum of C_k(A) terms[k], C_0 = 1."""

    sparse: Sparse
    terms: tuple[Node | None, ...]

    def __str__(self) -> str:
        return f"Clenshaw({self.sparse}; {', '.join('0' if t is None else str(t) for t in self.terms)})"


Node = Leaf | Transpose | MatMul | Scaled | Add | Horner | Step | Clenshaw
Factor = Node | Sparse | Diagonal


@dataclass(frozen=True, eq=False)
class Term(One):
    """scale * factors[0] factors[1] ...; scale is the name of a number, or None for one."""

    factors: tuple[Leaf | Transpose | Sparse | Diagonal, ...]
    scale: str | None = None

    def __str__(self) -> str:
        product = " ".join(str(f) for f in self.factors)
        return f"{self.scale} {product}" if self.scale else product


Expression = tuple[Term, ...]


@functools.cache
def transpose(factor: Factor) -> Factor:
    """The transpose of a factor; of a sparse power, the power of the transpose."""
    if isinstance(factor, Diagonal):
        return factor
    if isinstance(factor, Sparse):
        return replace(factor, rows=factor.cols, cols=factor.rows, transposed=not factor.transposed)
    if isinstance(factor, Transpose):
        return factor.of
    return Transpose(factor)


@functools.cache
def shape(node: Factor) -> tuple[str, str]:
    """Symbolic rows and columns."""
    if isinstance(node, (Leaf, Sparse)):
        return node.rows, node.cols
    if isinstance(node, Diagonal):
        return node.size, node.size
    if isinstance(node, Transpose):
        rows, cols = shape(node.of)
        return cols, rows
    if isinstance(node, MatMul):
        return shape(node.left)[0], shape(node.right)[1]
    if isinstance(node, Scaled):
        return shape(node.of)
    if isinstance(node, Step):
        return shape(node.before)
    if isinstance(node, Add):
        return shape(node.terms[0])
    last = next(t for t in reversed(node.terms) if t is not None)
    return node.sparse.rows, shape(last)[1]


@functools.cache
def children(node: Factor) -> tuple[Node, ...]:
    """The nodes a node is made of."""
    result: list[Node] = []
    for value in vars(node).values():  # loops: of long chains there are thousands
        for part in value if isinstance(value, tuple) else (value,):
            if part is not None and not isinstance(part, (str, bool, Sparse, Diagonal)):
                result.append(part)
    return tuple(result)


def mapped(node: Node, change: Callable[[Any], Any]) -> Any:
    """A node of the same kind, made of other nodes and matrices: change(part) for every part."""
    parts: list[Any] = []
    for value in vars(node).values():
        if isinstance(value, tuple):
            parts.append(tuple([None if part is None else change(part) for part in value]))
        else:
            parts.append(value if isinstance(value, (str, bool)) else change(value))
    return type(node)(*parts)


def gradient(expression: Expression, leaf: str) -> Expression:
    """The gradient with respect to a leaf, given G = dL/d(expression): again a sum of products.

    d/dM of tr(G' F M H) is F' G H'; where M stands transposed in a term, the transpose of that.
    """
    rows, cols = shape(expression[0].factors[0])[0], shape(expression[0].factors[-1])[1]
    upstream = Leaf("G", rows, cols)
    result = []
    for term, place in _places(expression)[leaf]:
        before: tuple[Any, ...] = tuple(transpose(f) for f in reversed(term.factors[:place]))
        after = tuple(transpose(f) for f in reversed(term.factors[place + 1 :]))
        product = (*before, upstream, *after)
        if isinstance(term.factors[place], Transpose):
            product = tuple(transpose(f) for f in reversed(product))
        result.append(Term(product, term.scale))
    return tuple(result)


def leaves(expression: Expression) -> list[str]:
    """Names of the dense leaves, in order of appearance."""
    return list(_places(expression))


@functools.cache
def _places(expression: Expression) -> dict[str, list[tuple[Term, int]]]:
    """Where each dense leaf stands, by name: terms and places in them."""
    result: dict[str, list[tuple[Term, int]]] = {}
    for term in expression:
        for place, factor in enumerate(term.factors):
            inner = factor.of if isinstance(factor, Transpose) else factor
            if isinstance(inner, Leaf):
                result.setdefault(inner.name, []).append((term, place))
    return result


def _bracket(node: Factor) -> str:
    return f"({node})" if isinstance(node, (MatMul, Add, Horner, Scaled, Step)) else str(node)
