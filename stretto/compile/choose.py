"""Which plan a layer runs: predicted first, then settled by timing the best few inside the user's own steps.

A decision is made once per signature (expression, gradients wanted, sizes, type, device) and looked up afterwards.
Sizes of sampled batches are rounded to quarter octaves, so that a stream of them shares a handful of decisions. Of 96
cells of the grid 92 ran a plan within 5 % of the fastest (benchmarks/results/grid.csv).
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stretto import kernels, settings
from stretto.compile.adjacency import Adjacency
from stretto.compile.constants import constant_nodes, keeper
from stretto.compile.execute import Call
from stretto.compile.expr import Diagonal, Expression, Leaf, MatMul, Sizes, Sparse, Transpose, leaves
from stretto.compile.layer import run
from stretto.compile.plan import Plan, Ranking, Request, plans, rank
from stretto.compile.powers import chain_of, fewer_edges
from stretto.machine import facts as machine
from stretto.machine import store
from stretto.machine.rates import Profile, profile
from stretto.ops.autograd_state import saved_elsewhere
from stretto.recording import unsettled

logger = logging.getLogger("stretto")

CLOSE = 1.6  # plans predicted within this factor of the best are worth timing
MOST_TRIED = 3
WARM = 3  # steps that are not timed: they build the graph and fault pages in, and the third use of an array moves it
TRIES = 3
MOST_STEPS = WARM + TRIES * MOST_TRIED  # until a plan is settled on; what is traced before may be one that is tried
HYSTERESIS = 0.95  # the predicted best is replaced only by a plan at least this much faster
COUNTS = ("n", "m", "E", "P", "F")  # sizes that differ from batch to batch
SMALL = 1 << 20  # gathered values below which the prediction stands: timing would measure noise


@dataclass
class Decision:
    """One signature's plans, what was measured of them, and the plan that is settled on."""

    ranking: Ranking
    sizes: Sizes
    candidates: list[Any]  # plans, or orders (orders.py)
    chosen: Any = None
    steady: Any = None  # what runs under hooks on what is saved, from the first such call on
    how: str = "predicted"
    times: dict[Any, list[float]] = field(default_factory=dict)
    warm: int = 0

    @property
    def trying(self) -> bool:
        """Whether the step that runs now is timed to settle on a plan."""
        return self.chosen is None and not saved_elsewhere()

    @contextmanager
    def instead(self, plan: Any) -> Iterator[None]:
        """What was chosen is `plan` for the length of the block: to time the plans that were not."""
        before, self.chosen = self.chosen, plan
        try:
            yield
        finally:
            self.chosen = before


class Chooser:
    """The decisions of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._decisions: dict[tuple[int, bool], dict[Hashable, Decision]] = {}  # by what they hold for: _known()
        self._kept: dict[str, Any] | None = None
        self._facts: dict[str, object] = {}

    def pick(self, key: Hashable, request: Request, sizes: Sizes, like: Tensor) -> tuple[Plan, Decision]:
        """The plan to run now, and the decision it belongs to."""
        return self.settle(key, lambda profile: rank(request, sizes, like.element_size(), profile), sizes, like)

    def settle(
        self, key: Hashable, ranked: Callable[[Profile], Ranking], sizes: Sizes, like: Tensor
    ) -> tuple[Any, Decision]:
        """What to run now of what `ranked` finds for this machine's rates, and the decision it belongs to."""
        decision = self._known().get(key)
        if decision is None:
            decision = self._decide(key, ranked, sizes, like)
        if saved_elsewhere():  # what backward computes again must save what forward did
            if decision.steady is None:
                decision.steady = decision.candidates[0] if decision.chosen is None else decision.chosen
            return decision.steady, decision
        if decision.chosen is not None:
            return decision.chosen, decision
        unsettled()
        return min(decision.candidates, key=lambda p: len(decision.times.get(p, ()))), decision

    def record(self, key: Hashable, plan: Any, seconds: float) -> None:
        """A timing of a plan inside a real step; settles the decision when every candidate has enough."""
        decision = self._known().get(key)
        if decision is None or decision.chosen is not None:
            return
        with self._lock:
            if decision.warm < WARM:
                decision.warm += 1
                return
            decision.times.setdefault(plan, []).append(seconds)
            if any(len(decision.times.get(p, ())) < TRIES for p in decision.candidates):
                return
            decision.ranking.measured.update({p: min(t) for p, t in decision.times.items()})
            measured = decision.ranking.measured
            first = decision.candidates[0]
            best = min(decision.candidates, key=lambda p: measured[p])
            decision.chosen = best if measured[best] < HYSTERESIS * measured[first] else first
            decision.how = "measured"
        self._load()  # whose file it is: the number of threads may have changed since
        store.add(
            "plans", self._facts, {_text(key): {"plan": decision.chosen.name, "ms": measured[decision.chosen] * 1e3}}
        )

    def decision(self, key: Hashable) -> Decision | None:
        """What is known of a signature."""
        return self._known().get(key)

    def clear(self) -> None:
        """Forget all decisions; the disk is asked again."""
        with self._lock:
            self._decisions.clear()
            self._kept = None

    def _known(self) -> dict[Hashable, Decision]:
        """The decisions that hold now: of so many threads, and under torch.use_deterministic_algorithms with nothing
        measured, whatever was before."""
        held = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
        result = self._decisions.get(held)
        return self._decisions.setdefault(held, {}) if result is None else result

    def _decide(self, key: Hashable, ranked: Callable[[Profile], Ranking], sizes: Sizes, like: Tensor) -> Decision:
        free = settings.tuning() and not torch.are_deterministic_algorithms_enabled()
        ranking = ranked(profile(like.device, measure=free))
        best_time = ranking.predicted[0][0]
        candidates = [plan for seconds, plan in ranking.predicted if seconds <= CLOSE * best_time][:MOST_TRIED]
        decision = Decision(ranking, sizes, candidates)
        # A device's rates are calibrated; timing inside a step would wait for it, and count its kernels' compilation.
        predicted = not free or not kernels.on_host(like)
        if len(candidates) == 1 or predicted or sizes["E"] * max(sizes.values()) == 0 or _small(sizes):
            decision.chosen = candidates[0]
        else:
            kept = self._load().get(_text(key))
            for plan in candidates:
                if isinstance(kept, dict) and kept.get("plan") == plan.name:
                    decision.chosen, decision.how = plan, "measured earlier"
                    ranking.measured[plan] = float(kept.get("ms", 0.0)) / 1e3
        with self._lock:
            return self._known().setdefault(key, decision)

    def _load(self) -> dict[str, Any]:
        if self._kept is None or self._facts["threads"] != torch.get_num_threads():
            self._facts = machine.describe()
            self._kept = store.read("plans", self._facts)
        return self._kept


def _text(key: Any) -> str:
    """A signature as the file on disk knows it."""
    expression, wanted, hoisted, sizes, dtype, device, backend = key
    terms = " + ".join(str(t) for t in expression)
    return f"{terms} | d{wanted} | {'hoisted' if hoisted else ''} | {sizes} | {dtype} {device} {backend}"


CHOOSER = Chooser()


def linear(
    expression: Expression,
    tensors: dict[str, Tensor],
    sparse: dict[str, Adjacency],
    *,
    bias: Tensor | None = None,
    scalars: dict[str, float] | None = None,
    note: Callable[[Hashable, Plan], None] | None = None,
    stock: str = "aggregate-first",
    after: tuple[tuple[Tensor, Tensor | None], ...] = (),
    hoist: bool = True,
) -> Tensor:
    """Evaluate a layer's expression by the best plan. tensors: leaf name -> matrix; sparse: name -> Adjacency.

    bias [o] is added to every row. note(key, plan) tells the caller what was chosen (for report and explain).
    stock: the order PyG itself uses, "aggregate-first" or "update-first".
    after: weight and bias of every ReLU and Linear that follow, where ops.relu_product agrees to follow.
    hoist: whether products of constants may be kept across steps; False where the caller has kept what it wants.
    """
    names = _names(expression)
    low = kernels.autocast_dtype(tensors[names[0]])
    if low is not None:  # as torch's own matmul: in the lower type, sums in fp32
        lowered = {name: t.to(low) for name, t in tensors.items()}
        with kernels.in_given_types(tensors[names[0]]):
            low_bias = None if bias is None else bias.to(low)
            options: dict[str, Any] = {"scalars": scalars, "note": note, "stock": stock, "hoist": hoist}
            return linear(expression, lowered, sparse, bias=low_bias, **options)
    first = tensors[names[0]]
    as_stock = settings.get("STRETTO_PLAN") == "stock"
    hoist, powers = hoist and not as_stock, not as_stock
    key, request, sizes = signature(expression, tensors, sparse, scalars, hoist=hoist, powers=powers)
    arguments = tuple([tensors[n] for n in names])
    if bias is not None:
        names, arguments = (*names, "bias"), (*arguments, bias)
    follow = _follow(len(after))
    for (weight_name, bias_name), (weight, own_bias) in zip(follow, after, strict=True):
        names, arguments = (*names, weight_name), (*arguments, weight)
        if own_bias is not None:
            names, arguments = (*names, bias_name), (*arguments, own_bias)
    if as_stock:
        return run(Call(stock_plan(request, stock), names, sparse, scalars or {}, after=follow), arguments)
    plan, decision = CHOOSER.pick(key, request, sizes, first)
    if note is not None:
        note(key, plan)
    timed = (lambda seconds: CHOOSER.record(key, plan, seconds)) if decision.trying else None
    keep = keeper(tensors, sparse, scalars or {}) if request.hoisted else None
    call = Call(plan, names, sparse, scalars or {}, keep, follow, timed, timed_backward=bool(request.wanted))
    return run(call, arguments)


@functools.cache
def _follow(count: int) -> tuple[tuple[str, str], ...]:
    """Names of weight and bias of what comes after a plan."""
    return tuple((f"weight {k}", f"bias {k}") for k in range(1, count + 1))


def signature(
    expression: Expression,
    tensors: dict[str, Tensor],
    sparse: dict[str, Adjacency],
    scalars: dict[str, float] | None = None,
    *,
    hoist: bool = True,
    powers: bool = True,
) -> tuple[Hashable, Request, Sizes]:
    """What a decision is kept under, what is asked for, and the sizes it depends on.

    hoist: whether products of constants may be kept; powers: whether a power of A may be multiplied out.
    """
    names = _names(expression)
    first = tensors[names[0]]
    wanted = tuple(n for n in names if tensors[n].requires_grad) if torch.is_grad_enabled() else ()
    sizes = _sizes(expression, tensors, sparse)
    hoisted = constant_nodes(expression, tensors, sparse, scalars or {}, sizes) if hoist else ()
    power, formed = chain_of(expression) if powers and not hoisted else None, 0
    if power is not None and sparse[power.name].weight is None:
        edges = fewer_edges(sparse[power.name].graph, power.power)
        if edges:
            sizes["F"], formed = edges, power.power
    near = rounded(tuple(sizes.items()))
    if not settings.torch_kernels():
        key = (expression, wanted, hoisted, near, first.dtype, kernels.kind_of(first), "stretto")
        return key, Request(expression, wanted, hoisted, formed=formed), sizes
    # torch's kernels leave the normalisation to us; ours fuse it, which no other way can beat (plan.ways).
    scales = tuple((n, a.row_scale is not None, a.col_scale is not None) for n, a in sparse.items() if a.scaled)
    normalised = "".join(f" {name}{'S' * row}{'T' * col}" for name, row, col in scales)
    key = (expression, wanted, hoisted, near, first.dtype, kernels.kind_of(first), "torch" + normalised)
    return key, Request(expression, wanted, hoisted, scales, fuses=False, formed=formed), sizes


@functools.cache
def stock_plan(request: Request, stock: str) -> Plan:
    """The order PyG and autograd take: aggregation before or after the weight, gradients sharing the forward's work."""
    result = plans(request)
    after = [p for p in result if str(p.forward).endswith(")") == (stock == "update-first")]
    return min(after or list(result), key=lambda p: sum(isinstance(n, MatMul) for n in p.nodes()))


@functools.cache
def _names(expression: Expression) -> tuple[str, ...]:
    return tuple(leaves(expression))


@functools.cache
def _sources(expression: Expression) -> tuple[tuple[bool, str, str, str], ...]:
    """Where each symbolic size is read from: (sparse, name, rows, columns)."""
    result: dict[tuple[bool, str, str, str], None] = {}
    for term in expression:
        for factor in term.factors:
            inner = factor.of if isinstance(factor, Transpose) else factor
            if isinstance(inner, Diagonal):
                continue
            assert isinstance(inner, (Leaf, Sparse))
            rows, cols = inner.rows, inner.cols
            if isinstance(inner, Sparse) and inner.transposed:
                rows, cols = cols, rows
            result[isinstance(inner, Sparse), inner.name, rows, cols] = None
    return tuple(result)


def _sizes(expression: Expression, tensors: dict[str, Tensor], sparse: dict[str, Adjacency]) -> Sizes:
    sizes: Sizes = {}
    for is_sparse, name, rows, cols in _sources(expression):
        if is_sparse:
            graph = sparse[name].graph
            sizes["E"], sizes[rows], sizes[cols] = graph.num_edges, graph.num_rows, graph.num_cols
            if sparse[name].weight is not None:
                sizes["weighted"] = 1
            if settings.torch_kernels():
                sizes["weighted"] = 1  # torch's product reads a value per edge, whatever it is
                if sparse[name].scaled and not sparse[name].met():
                    sizes["fresh"] = 1
        else:
            sizes[rows], sizes[cols] = tensors[name].shape
    return sizes


@functools.lru_cache(maxsize=4096)
def rounded(sizes: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    """Counts of nodes, edges and pairs in quarter octaves, widths as they are."""
    return tuple((n, round(4 * math.log2(size)) if n in COUNTS and size else size) for n, size in sizes)


def _small(sizes: Sizes) -> bool:
    width = max(size for name, size in sizes.items() if name not in (*COUNTS, "weighted", "fresh"))
    return sizes["E"] * width < SMALL
