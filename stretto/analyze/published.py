"""Work and depth as published (Besta and Hoefler, arXiv 2205.09702v4, tables 2 and 5 to 7), beside what code does.

n vertices, m edges, d largest degree, k features, L layers, K depth of an MLP, T hops (s in the source), c samples.
Bounds are per iteration, training or inference, up to constants. `work` and `depth` are the published totals;
`implemented_work` and `implemented_depth` are the leading terms of the usual implementation, where they differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
from sympy import Expr, Integer

n, m, d, k, L, K, T, c = sympy.symbols("n m d k L K T c", positive=True)


def lg(x: Expr) -> Expr:
    """Logarithm to base 2, kept as a symbol of its own in the formulas."""
    return sympy.Function("log")(x)


@dataclass(frozen=True)
class Row:
    """One model of the tables."""

    model: str
    pyg: tuple[str, ...]  # the classes of PyG that are this model
    kind: str  # C, A, MP
    type: str  # L, P, R
    psi_work: Expr | None
    psi_depth: Expr | None
    work: Expr
    depth: Expr
    implemented_work: Expr
    implemented_depth: Expr
    note: str = ""


def _layers(psi: Expr, phi: Expr = n * k**2) -> Expr:
    """L layers: psi on every edge, the sum of k-vectors over edges, phi on every vertex; k m is absorbed by more."""
    edges = m * psi if psi.has(k) else m * k
    return sympy.expand(L * (edges + phi))


_one = Integer(1)
_plain = _layers(k)
_deep = L * lg(d) + L * lg(k)
_chain = T * m * k + T * n * k**2
_hops = T * lg(d) + lg(k)
_power = m * n * lg(T) + n * k**2
_power_depth = lg(k) + lg(T) * lg(d)

ROWS = (
    Row("GCN", ("GCNConv",), "C", "L", k, _one, _plain, _deep, _plain, _deep, "SpMM at min(k_in, k_out)"),
    Row("GraphSAGE mean", ("SAGEConv",), "C", "L", _one, _one, _plain, _deep, _plain, _deep, "the copy is really O(k)"),
    Row(
        "GIN",
        ("GINConv",),
        "C",
        "L",
        _one,
        _one,
        _layers(_one, K * n * k**2),
        L * lg(d) + L * K * lg(k),
        _layers(_one, K * n * k**2),
        L * lg(d) + L * K * lg(k),
        "the global table prints LK log d, an over-count",
    ),
    Row("CommNet", ("GraphConv",), "C", "L", _one, _one, _plain, _deep, _plain, _deep, "two GEMMs"),
    Row("Vanilla attention", ("TransformerConv",), "A", "L", k, lg(k), _plain, _deep, _plain, _deep, "SDDMM and SpMM"),
    Row("AGNN", ("AGNNConv",), "A", "L", k, lg(k), _plain, _deep, _plain, _deep, "norms hoisted to the nodes"),
    Row(
        "GAT",
        ("GATConv", "GATv2Conv"),
        "A",
        "L",
        d * k**2,
        lg(k) + lg(d),
        sympy.expand(L * (m * d * k**2 + n * k**2)),
        _deep,
        _plain,
        _deep,
        "W hoisted to the nodes, softmax sum shared",
    ),
    Row(
        "MoNet",
        ("GMMConv",),
        "A",
        "L",
        k**2,
        lg(k),
        _layers(k**2),
        _deep,
        _layers(K * k),
        _deep,
        "pseudo-coordinates are few",
    ),
    Row(
        "G-GCN",
        ("ResGatedGraphConv",),
        "MP",
        "L",
        k**2,
        lg(k),
        _layers(k**2),
        _deep,
        _plain,
        _deep,
        "gates hoisted to the nodes",
    ),
    Row(
        "GraphSAGE pool",
        ("SAGEConv",),
        "MP",
        "L",
        k**2,
        lg(k),
        _layers(k**2),
        _deep,
        _plain,
        _deep,
        "projection hoisted to the nodes",
    ),
    Row("EdgeConv choice 1", (), "MP", "L", k**2, lg(k), _layers(k**2), _deep, _plain, _deep, "linear psi: hoisted"),
    Row(
        "EdgeConv choice 5",
        ("EdgeConv", "DynamicEdgeConv"),
        "MP",
        "L",
        k**2,
        lg(k),
        _layers(k**2),
        _deep,
        _layers(k**2),
        _deep,
        "an MLP on every edge",
    ),
    Row(
        "SGC", ("SGConv",), "C", "P", None, None, _power, _power_depth, T * m * k + n * k**2, _hops, "a chain of T SpMM"
    ),
    Row("ChebNet", ("ChebConv",), "C", "P", None, None, _power, _power_depth, _chain, _hops, "recurrence"),
    Row("DeepWalk, DCNN, GDC", (), "C", "P", None, None, _power, _power_depth, _chain, _hops, ""),
    Row("TAGCN", ("TAGConv",), "C", "P", None, None, _chain, _hops, _chain, _hops, "derived; not in the source"),
    Row(
        "Node2Vec, LINE, SDNE",
        (),
        "C",
        "P",
        None,
        None,
        m * n + n * k**2,
        lg(k) + lg(d),
        m * n + n * k**2,
        lg(k) + lg(d),
        "",
    ),
    Row(
        "PPNP, ARMA",
        ("APPNP", "ARMAConv"),
        "C",
        "R",
        None,
        None,
        n**3 + n * k**2,
        lg(n) ** 2 + lg(k),
        T * m * k + n * k**2,
        _hops,
        "power iteration instead of an inverse",
    ),
)

# scheme -> (work, depth) of one iteration; c samples per vertex and layer
SCHEMES = {
    "full batch": (_plain, _deep),
    "GraphSAGE, VR-GCN": (_plain + c**L * n * k**2, L * lg(k) + L * lg(c)),
    "FastGCN": (_plain + c * L * n * k**2, L * lg(k) + L * lg(c)),
    "Cluster-GCN, GraphSAINT": (_plain, _deep),
}


@dataclass(frozen=True)
class Inconsistency:
    """A place where the published bound and the code that runs disagree."""

    key: str
    where: str
    published: Expr
    implemented: Expr
    reason: str


_row = {row.model: row for row in ROWS}
INCONSISTENCIES = (
    Inconsistency(
        "i",
        "GAT, G-GCN, MoNet, pool",
        _row["GAT"].work,
        _row["GAT"].implemented_work,
        "the bound evaluates psi anew on every edge; real code multiplies by W once per node",
    ),
    Inconsistency(
        "ii",
        "EdgeConv choice 1, tables 6 and 7",
        _row["EdgeConv choice 1"].work,
        _row["EdgeConv choice 1"].implemented_work,
        "linear psi: the tables differ, hoisting explains it",
    ),
    Inconsistency(
        "iii",
        "GIN depth, tables 6 and 7",
        L * K * lg(d) + L * K * lg(k),
        _row["GIN"].depth,
        "the neighbours are reduced once per layer, not once per layer of the MLP",
    ),
    Inconsistency(
        "iv",
        "copying psi, Scatter",
        _one,
        m * k,
        "work O(1) is counted for a copy of k values per edge; the values move all the same",
    ),
    Inconsistency(
        "v",
        "powers of A: SGC, ChebNet",
        _power,
        T * m * k + n * k**2,
        "A^T fills in, up to n^2 entries; T products with a tall matrix cost less while T k < n log T",
    ),
    Inconsistency(
        "vi",
        "mini-batch schemes",
        SCHEMES["GraphSAGE, VR-GCN"][0],
        c**L * n * k**2,
        "the sampled term is added to the full-batch term, which a sampled epoch does not also run",
    ),
    Inconsistency(
        "vii",
        "depth of every model",
        _deep,
        _deep + 4 * L,
        "four dependent kernels per layer, each with a launch that no log d pays for",
    ),
)


def evaluate(expression: Expr, values: Mapping[str, float]) -> float:
    """A number for the formula; log is to base 2. values by letter: n, m, d, k, L, K, T, c."""
    table: Any = {s: values[str(s)] for s in expression.free_symbols}
    numeric: Any = expression.subs(table).replace(sympy.Function("log"), lambda x: sympy.log(sympy.Max(x, 2), 2))
    return float(numeric)


# Class and type as found in a trace -> the row that stands for layers of no known name.
GENERAL = {
    ("C", "L"): "GCN",
    ("A", "L"): "Vanilla attention",
    ("MP", "L"): "EdgeConv choice 5",
    ("C", "P"): "DeepWalk, DCNN, GDC",
    ("C", "R"): "PPNP, ARMA",
}


def find(pyg_class: str, kind: str, type: str = "") -> Row | None:
    """The row for a PyG class; SAGEConv is two rows, told apart by the class found in the trace. For a class that no
    table has, the row of its class and type."""
    rows = [row for row in ROWS if pyg_class in row.pyg]
    if rows:
        return next((row for row in rows if row.kind == kind), rows[0])
    return _row.get(GENERAL.get((kind, type), ""))
