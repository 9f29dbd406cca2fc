"""From measurements to advice, and from advice to a measured gain.

A layer is a call site of `stretto.accelerate`: it runs alone, stock against accelerated, on the inputs it had in the
model, in turns with the whole step. What the layers save together, as a share of the step, is the predicted gain;
`apply` then measures the step itself. Each side has the allocator that it would have alone: stock gets new memory for
every large result, an accelerated model keeps it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from stretto import memory
from stretto.analyze.classify import layer_paths
from stretto.analyze.clock import device_of
from stretto.analyze.workload import Workload
from stretto.bench.run import as_alone, relative_error
from stretto.graph import Graph
from stretto.profile.replay import operands
from stretto.profile.sweep import TIE
from stretto.profile.untouched import untouched
from stretto.report import explain
from stretto.tune.timing import Timing, measure, ratio

if TYPE_CHECKING:
    from stretto.profile.profiling import Profile

REPEATS = 20
SETTLE = 5  # calls in which the tuner tries its variants
# Relative error of outputs, ours against stock's, by type; of any other type as of fp32.
ALLOWED = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
WHOLE = "stock, the step"


class Site(NamedTuple):
    """A layer, what it was called with, how often a step calls it, and whether each step brings another graph."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    calls: float = 1
    new_graph: bool = False


def sites_of(profile: Profile) -> dict[str, Site]:
    """The layers of the model by path, each with the arguments of its first call and how many a step has."""
    model = profile.workload.model
    modules = dict(model.named_modules())
    seen: dict[str, Site] = {}
    handles = []
    for path in layer_paths(model, profile.trace):

        def hook(module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            first = seen.get(path) or Site(module, detached(args), detached(kwargs), 0, profile.new_graphs)
            seen[path] = first._replace(calls=first.calls + 1)

        handles.append(modules[path].register_forward_pre_hook(hook, with_kwargs=True))
    try:
        profile.workload.run()
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    return seen


def detached(value: Any) -> Any:
    """The value with every tensor inside cut from its graph; those that carried gradients still ask for them."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_() if value.requires_grad else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(detached, value))
    if isinstance(value, (list, tuple)):
        return type(value)(detached(v) for v in value)
    if isinstance(value, dict):
        return {k: detached(v) for k, v in value.items()}
    return value


def indices(args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among arguments that are an edge_index [2, E]."""
    found = operands((args, kwargs))
    return [t for t in found if t.dim() == 2 and t.size(0) == 2 and t.dtype in (torch.int64, torch.int32)]


def with_new_graph(step: Callable[[], object]) -> Callable[[], object]:
    """The step as it is on a graph that was never seen before."""

    def call() -> object:
        Graph.cache_clear()
        return step()

    return call


def _layer_step(layer: nn.Module, args: Any, kwargs: Any, train: bool) -> Callable[[], object]:
    def step() -> object:
        with torch.set_grad_enabled(train):
            out = layer(*args, **kwargs)
            out = out[0] if isinstance(out, tuple) else out
            if train and out.requires_grad:
                layer.zero_grad(set_to_none=True)
                out.sum().backward()
        return out

    return step


def _in_turns(
    steps: dict[str, Callable[[], object]], repeats: int, budget: float | None, device: torch.device
) -> dict[str, Timing]:
    """Time the steps, then leave the allocator as it was."""
    kept = memory.is_kept()
    memory.give_back()  # large blocks kept from before would serve stock too
    try:
        return measure(steps, repeats=repeats, warmup=2, budget=budget, device=device)
    finally:
        memory.switch(kept)


def recommend(profile: Profile, *, repeats: int = REPEATS, budget: float | None = 60.0) -> list[dict[str, Any]]:
    """Advice by call site: layers to accelerate, and single ops where the sweep found a faster candidate."""
    workload = profile.workload
    sites = sites_of(profile)
    return [*layer_advice(sites, workload.mode == "train", repeats, budget, step=workload.run), *op_advice(profile)]


def layer_advice(
    sites: dict[str, Site], train: bool, repeats: int, budget: float | None, step: Callable[[], object] | None = None
) -> list[dict[str, Any]]:
    """Each layer alone, stock against accelerated, on the inputs it had; all of them in turns.

    step: of the whole model, timed in the same turns; "share" of it is what a layer saves, whatever the machine does
    by the time that the advice is followed.
    """
    from stretto import accelerate
    from stretto.nn.classes import fast_of, stock_of

    rows: list[dict[str, Any]] = []
    steps: dict[str, Callable[[], object]] = {}
    tried: dict[str, Site] = {}
    made: set[tuple[int, ...]] = set()  # graphs that a layer before has made
    for path, site in sites.items():
        layer, args, kwargs = site[:3]
        row: dict[str, Any] = {"site": path or "model", "kind": "layer", "now": type(layer).__name__}
        rows.append(row)
        if fast_of(type(layer)) is None:
            why = "accelerated already" if stock_of(type(layer)) else "no fast path for this class"
            row |= {"best": "as it is", "advice": "nothing to gain", "reason": why, "saves_ms": 0.0, "share": 0.0}
            continue
        stock = copy.deepcopy(layer).train(train)
        fast = accelerate(copy.deepcopy(layer)).train(train)
        for name, one in (("stock", stock), ("accelerated", fast)):
            steps[f"{name}, {row['site']}"] = as_alone(name, _layer_step(one, args, kwargs, train))
        tried[row["site"]] = site._replace(module=fast)
        graph = tuple(id(index) for index in indices(args, kwargs))
        if site.new_graph and graph not in made:
            made.add(graph)
            steps[f"accelerated, {row['site']}"] = with_new_graph(steps[f"accelerated, {row['site']}"])
        for _ in range(SETTLE):
            steps[f"accelerated, {row['site']}"]()
    if not steps:
        return rows
    if step is not None:
        steps[WHOLE] = as_alone(WHOLE, step)
    timings = _in_turns(steps, repeats, budget, device_of(next(iter(sites.values()))[0]))
    for row in rows:
        if f"stock, {row['site']}" in timings:
            row |= _judged(timings, row["site"], tried[row["site"]])
            row["plans"] = _plans(tried[row["site"]], row["speedup"][0], train)
    if WHOLE in timings:  # alone, layers may find less free memory than in a step; they are no more than all of it
        known = [row for row in rows if "stock" in row]
        whole = max(timings[WHOLE].median * 1e3, sum(row["stock"]["median_ms"] * row["calls"] for row in known))
        for row in known:
            row["share"] = row["saves_ms"] / whole
    return rows


def _judged(timings: dict[str, Timing], site: str, tried: Site) -> dict[str, Any]:
    """What the times of one layer say; what it saves is for all its calls in a step."""
    slow, fast = timings[f"stock, {site}"], timings[f"accelerated, {site}"]
    times, low, high = ratio(slow, fast)
    better = low > TIE
    calls = tried.calls
    saves = (slow.median - fast.median) * 1e3 * calls if better else 0.0
    often = f", called {calls:.3g} times a step" if calls != 1 else ""
    often += ", every step with another graph" if tried.new_graph else ""
    return {
        "best": "stretto.accelerate" if better else "as it is",
        "advice": "accelerate" if better else "nothing to gain",
        "speedup": (times, low, high),
        "saves_ms": saves,
        "calls": calls,
        "reason": f"{times:.2f}x ({low:.2f}-{high:.2f}) alone, on its own inputs" + verdict(low, high) + often,
        "stock": slow.to_dict(),
        "accelerated": fast.to_dict(),
    }


def _plans(site: Site, speedup: float, train: bool) -> list[dict[str, Any]]:
    """The plans of an accelerated layer, each with its speed-up over stock: of the one that runs as it was measured, of
    the others as the compiler has them beside that one, by measurement where they were tried."""
    layer, args, kwargs = site[:3]
    with torch.set_grad_enabled(train):
        candidates = [c for told in explain(layer, *args, **kwargs).layers[:1] for c in told.candidates]
    runs = next((c for c in candidates if c.chosen), None)
    if runs is None:
        return []
    found = []
    for c in candidates:
        both = None not in (c.measured_ms, runs.measured_ms)
        mine, usual = (c.measured_ms, runs.measured_ms) if both else (c.predicted_ms, runs.predicted_ms)
        times = speedup if c is runs else speedup * usual / mine if mine and usual else None
        known = "measured" if both or c is runs else "predicted"
        found.append({"plan": c.plan, "runs": c.chosen, "speedup": times, "by": known})
    return found


KEY = ("op", "phase", "shapes", "layout")  # of a swept op


def op_advice(profile: Profile) -> list[dict[str, Any]]:
    """The winner of each swept op at its own point, and whether another order of the index would pay."""
    rows: list[dict[str, Any]] = []
    for key in dict.fromkeys(tuple(r[k] for k in KEY) for r in profile.sweeps):
        mine = [r for r in profile.sweeps if tuple(r[k] for k in KEY) == key]
        base = [r for r in mine if r["axis"] == "base" and "median_ms" in r]
        if not base:
            continue
        best, native = min(base, key=lambda r: r["median_ms"]), base[0]["native"]
        row = {"site": best["site"], "kind": "op", "now": best["op"], "best": best["candidate"], "saves_ms": 0.0}
        rows.append(row | {"reorder": _reorder(mine, best), "winners": _by_order(mine)})
        if "speedup" not in best:  # nothing to compare with
            rows[-1] |= {"advice": "nothing to gain", "reason": f"{native}, which runs, was not timed"}
            continue
        times, low, high = best["speedup"]
        better = low > TIE
        took = sum(g.seconds for g in profile.groups if (g.name, g.phase, g.shapes, g.layout) == key)
        said = f"{best['candidate']}: {times:.2f}x ({low:.2f}-{high:.2f}) the speed of {native}, which runs"
        said = f"{native}, which runs, is the fastest" if best["candidate"] == native else said + verdict(low, high)
        part = min(best["edges"], best["nodes"])
        rows[-1] |= {
            "advice": f"use {best['candidate']}" if better else "nothing to gain",
            "speedup": (times, low, high),
            "saves_ms": took * 1e3 * (1 - 1 / times) if better else 0.0,
            "reason": said + (f" (on {part:.1%} of its rows)" if part < 1 else ""),
        }
    return rows


def verdict(low: float, high: float) -> str:
    """What an interval of a ratio says, in words that follow it; "" for a gain."""
    if low > TIE:
        return ""
    return ": slower" if high < 1 else ": a tie" if low <= 1 else ": too little to count"


def winner(rows: list[dict[str, Any]]) -> str:
    """The fastest candidate; all those whose interval overlaps with its own, where the clock cannot tell them apart."""
    ordered = sorted(rows, key=lambda r: r["median_ms"])
    equal = [r["candidate"] for r in ordered if r["ci_ms"][0] <= ordered[0]["ci_ms"][1]]
    return equal[0] if len(equal) == 1 else "tie: " + ", ".join(sorted(equal))


def _by_order(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Order of the index -> the fastest candidate there."""
    timed = [r for r in rows if r["axis"] in ("base", "order") and "median_ms" in r]
    return {
        order: winner([r for r in timed if r["order"] == order]) for order in dict.fromkeys(r["order"] for r in timed)
    }


def _reorder(rows: list[dict[str, Any]], best: dict[str, Any]) -> str:
    other = [r for r in rows if r["axis"] == "order" and r["candidate"] == best["candidate"] and "median_ms" in r]
    if not other:
        return "not measured"
    first = min(other, key=lambda r: r["median_ms"])
    gain = best["median_ms"] / first["median_ms"]
    return f"{first['order']}: {gain:.2f}x" if gain > TIE else "no"


def outputs(workload: Workload) -> list[Tensor]:
    """What the model gives in evaluation mode, every tensor of it."""
    with untouched(workload.model), torch.no_grad():
        torch.manual_seed(0)
        workload.model.eval()
        return operands(workload._forward())


def difference(stock: list[Tensor], fast: list[Tensor]) -> str:
    """Why two lists of outputs are not the same; "" if they are."""
    if not stock or len(stock) != len(fast):
        return "there are no outputs to compare" if not stock else "the outputs are other ones"
    for a, b in zip(stock, fast, strict=True):
        error = relative_error(b, a.double())
        if not error <= ALLOWED.get(a.dtype, ALLOWED[torch.float32]):  # not a number is not equal either
            return f"outputs differ by {error:.1e}"
    return ""


def worst(stock: list[Tensor], fast: list[Tensor]) -> float:
    """The largest relative error among the outputs."""
    return max((relative_error(b, a.double()) for a, b in zip(stock, fast, strict=True)), default=0.0)


def accelerate_sites(model: nn.Module, chosen: list[dict[str, Any]]) -> str:
    """Accelerate the layers that rows of advice name, in place; the name of one that is not there, or ""."""
    from stretto import accelerate

    modules = dict(model.named_modules())
    paths = ["" if row["site"] == "model" else row["site"] for row in chosen]
    for path in paths:
        if path not in modules:
            return path
    for path in paths:
        accelerate(modules[path])
    return ""


def apply(profile: Profile, *, repeats: int = REPEATS) -> dict[str, Any]:
    """Accelerate the model where that was advised (in place), if its outputs stay equal and its step gets faster."""
    if not profile.advice:
        profile.recommend()
    chosen = [row for row in profile.advice if row["advice"] == "accelerate"]
    if not chosen:
        return dict(NOTHING)
    workload = profile.workload
    fast = Workload(copy.deepcopy(workload.model), workload.data, workload.mode, workload.step)
    accelerate_sites(fast.model, chosen)
    before, after = outputs(workload), outputs(fast)
    reason = difference(before, after)
    if reason:
        predicted = sum(row["saves_ms"] for row in chosen)
        return {"applied": False, "reason": f"not applied: {reason}", "predicted_ms": predicted}
    run = with_new_graph(fast.run) if profile.new_graphs else fast.run
    for _ in range(SETTLE):
        run()
    steps = {"stock": as_alone("stock", workload.run), "accelerated": as_alone("accelerated", run)}
    timings = _in_turns(steps, repeats, None, workload.device)
    done = realised(timings, chosen)
    if done["applied"]:
        accelerate_sites(workload.model, chosen)
    return {**done, "error": worst(before, after)}


NOTHING = {"applied": False, "reason": "nothing to gain", "predicted_ms": 0.0, "realised_ms": 0.0}


def realised(timings: dict[str, Timing], chosen: list[dict[str, Any]]) -> dict[str, Any]:
    """The gain of a step, stock and accelerated in turns, beside the one predicted; applied if it is beyond doubt."""
    stock, fast = timings["stock"], timings["accelerated"]
    times, low, high = ratio(stock, fast)
    gain = (stock.median - fast.median) * 1e3
    # A share of the step: the machine may have another pace than when it was advised.
    predicted = sum(row["share"] for row in chosen) * stock.median * 1e3
    layers = f"{len(chosen)} layer{'s' if len(chosen) > 1 else ''}"
    seen = f"{times:.2f}x ({low:.2f}-{high:.2f}) as fast"
    said = f"{layers} accelerated: the step is {seen}"
    if low <= 1:
        said = f"not applied: with {layers} accelerated the step is {seen}: {'slower' if high < 1 else 'a tie'}"
    return {
        "applied": low > 1,
        "reason": said,
        "speedup": (times, low, high),
        "predicted_ms": predicted,
        "realised_ms": gain,
        "agreement": gain / predicted if predicted else None,
        **{name: timing.to_dict() for name, timing in timings.items()},
    }


def dispatch_table(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Call site -> what to run there, from a sweep; a tie is called one, since another run may decide otherwise."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["axis"] == "base" and "median_ms" in row:
            found.setdefault(f"{row['op']} [{row['shapes']}] {row['phase']}", []).append(row)
    return {site: winner(timed) for site, timed in found.items()}
