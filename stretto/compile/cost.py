"""What a plan costs: every node it computes priced by a roofline, nodes computed once and shared counted once."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from stretto.compile.expr import (
    Add,
    Clenshaw,
    Diagonal,
    Horner,
    Leaf,
    MatMul,
    Node,
    Scaled,
    Sizes,
    Sparse,
    Step,
    Transpose,
    children,
    shape,
)
from stretto.machine.rates import Profile


@dataclass(frozen=True)
class Work:
    """One kernel call: its kind ("spmm", "gemm", "add", "scale", "values"), width of a spmm, flops and bytes."""

    kind: str
    width: int
    flops: float
    bytes: float
    gathered: float = 0.0  # of the bytes, those read row by row at random
    row_bytes: float = 0.0

    def seconds(self, profile: Profile) -> float:
        """The larger of arithmetic and traffic, and the call itself."""
        traffic = (self.bytes - self.gathered) / profile.stream
        if self.gathered:
            traffic += self.gathered / profile.gather_rate(self.row_bytes)
        return profile.seconds(max(self.flops / profile.gemm, traffic), self.kind)


def closure(node: Node, seen: dict[Node, None] | None = None) -> dict[Node, None]:
    """All nodes needed to compute a node, itself last, each once."""
    seen = {} if seen is None else seen
    if node not in seen:
        for child in children(node):
            if child not in seen:  # asked here, too: most are, and a call takes longer than to ask
                closure(child, seen)
        seen[node] = None
    return seen


class Kind(NamedTuple):
    """All of a node that its time depends on: there are few kinds, where there are many nodes.

    form: of the sparse matrix it multiplies by, if it does; inner: what a product of two dense ones sums over;
    added: for each term of a sum, whether there is one.
    """

    type: type
    shape: tuple[str, str]
    form: str | None = None
    inner: str = ""
    added: tuple[bool, ...] = ()


@functools.cache
def kind_of(node: Node) -> Kind:
    """What kind of work computes a node from its children."""
    sparse = matrix_of(node)
    form = None if sparse is None else sparse.form
    if isinstance(node, MatMul):
        inner = "" if isinstance(node.left, (Sparse, Diagonal)) else shape(node.left)[1]
        return Kind(MatMul, shape(node), form, inner)
    if isinstance(node, (Add, Horner, Clenshaw)):
        return Kind(type(node), shape(node), form, added=tuple(term is not None for term in node.terms))
    return Kind(type(node), shape(node), form)


def works(kind: Kind, sizes: Sizes, value_bytes: int) -> list[Work]:
    """The kernel calls that compute a node of a kind from its children."""
    if kind.type in (Leaf, Transpose):
        return []
    rows, cols = (sizes[s] for s in kind.shape)
    out = rows * cols * value_bytes
    if kind.form is None:
        if kind.type is MatMul and kind.inner:
            inner = sizes[kind.inner]
            return [Work("gemm", cols, 2.0 * rows * inner * cols, (rows * inner + inner * cols) * value_bytes + out)]
        if kind.type is MatMul:
            return [Work("scale", cols, rows * cols, 2 * out)]
        if kind.type is Scaled:
            return [Work("add", cols, rows * cols, 2 * out)]
        # A product that nobody else needs is accumulated by the GEMM that makes it; charge one pass per addition.
        return [Work("add", cols, rows * cols, out)] * (len(kind.added) - 1)
    step = _spmm(kind.form, sizes, rows, cols, value_bytes)
    if kind.type is MatMul:
        return [step]
    added = Work(step.kind, step.width, step.flops, step.bytes + out, step.gathered, step.row_bytes)
    if kind.type is Step:
        return [added]
    later = [Work("add", cols, rows * cols, 3 * out)] * (len(kind.added) - 2 if kind.type is Clenshaw else 0)
    return [added if there else step for there in kind.added[:-1]] + later


def _spmm(form: str, sizes: Sizes, rows: int, cols: int, value_bytes: int) -> Work:
    edges, row_bytes = sizes["F" if form == "formed" else "E"], cols * value_bytes
    gathered = float(edges * row_bytes)
    weight_bytes = 8 if sizes.get("weighted") or form in ("edges", "formed") else 4
    return Work(
        "spmm",
        cols,
        2.0 * edges * cols,
        gathered + edges * weight_bytes + rows * (row_bytes + 8),
        gathered,
        row_bytes,
    )


def works_of(nodes: Iterable[Node], sizes: Sizes, value_bytes: int) -> list[Work]:
    """The kernel calls that compute a set of nodes; on a graph not met before, also its normalised edges."""
    result = [w for node in nodes for w in works(kind_of(node), sizes, value_bytes)]
    return result + _fresh(nodes, sizes, value_bytes)


def _fresh(nodes: Iterable[Node], sizes: Sizes, value_bytes: int) -> list[Work]:
    """Normalised edges, made on a graph not met before."""
    if not sizes.get("fresh"):
        return []
    # Two values gathered, multiplied, and put in the user's order, for every edge; once for either direction.
    made = {sparse for sparse in map(matrix_of, nodes) if sparse is not None and sparse.form == "edges"}
    edges = sizes["E"]
    return [Work("values", 1, 2.0 * edges, edges * (24 + 6 * value_bytes), 8.0 * edges, 4)] * len(made)


@functools.cache
def matrix_of(node: Node) -> Sparse | None:
    """The sparse matrix a node multiplies by, if it does."""
    if isinstance(node, (Horner, Step, Clenshaw)):
        return node.sparse
    return node.left if isinstance(node, MatMul) and isinstance(node.left, Sparse) else None


class Prices:
    """Predicted seconds on one input; nodes of one kind, which many plans compute, are priced once."""

    def __init__(self, sizes: Sizes, value_bytes: int, profile: Profile) -> None:
        self.sizes, self.value_bytes, self.profile = sizes, value_bytes, profile
        self._known: dict[Kind, float] = {}

    def of(self, nodes: Iterable[Node]) -> float:
        """Seconds to compute a set of nodes."""
        fresh = _fresh(nodes, self.sizes, self.value_bytes)
        return sum(map(self._node, nodes)) + sum(work.seconds(self.profile) for work in fresh)

    def _node(self, node: Node) -> float:
        kind = kind_of(node)
        result = self._known.get(kind)
        if result is None:
            result = sum(work.seconds(self.profile) for work in works(kind, self.sizes, self.value_bytes))
            self._known[kind] = result
        return result


# On a GPU: the products of a head with its own part of the weight run as a batch of thin GEMMs, which reach about half
# the rate of one; and what is summed before it is projected, [n, heads * i], is written and read once more each way.
BATCHED = 2.0


def gat_on_gpu(profile: Profile, edges: int, rows: int, i: int, heads: int, width: int) -> tuple[float, float]:
    """Seconds of GAT's step on a GPU, projecting x [m, i] to heads * width first, and summing it first.

    Forward gathers i values an edge rather than heads * width; backward gathers the gradient of the sum, heads * i,
    rather than heads * width.
    """
    b = 4

    def gathered(values: int) -> float:
        return edges * values * b / profile.gather_rate(values * b)

    gemms = 3 * 2.0 * rows * i * heads * width / profile.gemm
    project_first = gemms + 2 * gathered(heads * width) + 4 * rows * heads * width * b / profile.stream
    sums = gathered(i) + gathered(heads * i) + 8 * rows * heads * i * b / profile.stream
    return project_first, BATCHED * gemms + sums


# On the CPU a gathered value costs about four products with values that are there; measured.
PRODUCT = 0.25


def gat_on_cpu(profile: Profile, sizes: Sizes, heads: int, value_bytes: int, passes: int) -> tuple[float, float]:
    """Seconds of GAT on the CPU: x [m, i] projected to o columns first, and summed first. passes: 3 with gradients.

    Summing first gathers i values an edge, and multiplies each with a weight per head; its small GEMMs per head ask
    for a margin.
    """
    edges, i, o = sizes["E"], sizes["i"], sizes["o"]
    rate = profile.gather_rate(max(i, o) * value_bytes)
    project_first = edges * o * (1 + PRODUCT) * value_bytes / rate + 2.0 * sizes["m"] * i * o / profile.gemm
    margin = 1.5
    sum_first = (
        margin * edges * i * (1 + heads * PRODUCT) * value_bytes / rate + 2.0 * sizes["n"] * i * o / profile.gemm
    )
    return passes * project_first, passes * sum_first


def rgcn_seconds(profile: Profile, sizes: Sizes, bases: int, value_bytes: int, passes: int) -> tuple[float, float]:
    """Seconds of RGCN by P pairs of relation and node, and by bases: sum_b (sum_r c_rb A_r) X V_b."""
    edges, n, pairs, i, o = (sizes[name] for name in ("E", "n", "P", "i", "o"))
    b = value_bytes

    def gathered(count: int, width: int) -> float:
        return count * width * b / profile.gather_rate(width * b)

    by_pairs = gathered(edges, i) + gathered(pairs, o) + 2.0 * pairs * i * o / profile.gemm
    by_pairs += (2 * pairs * (i + o) + n * o) * b / profile.stream
    by_bases = gathered(edges, i) * (1 + bases * PRODUCT) + 2.0 * n * bases * i * o / profile.gemm
    by_bases += (2 * n * bases * i + n * o + 3 * edges * bases) * b / profile.stream
    return passes * by_pairs, passes * by_bases
