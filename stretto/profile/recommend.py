"""From measurements to advice, and from advice to a measured gain.

A layer is a call site of `stretto.accelerate`: it runs alone, stock against accelerated, on the inputs it had in the
model, in turns with the whole step. What the layers save together, as a share of the step, is the predicted gain;
`apply` then measures the step itself. Each side has the allocator that it would have alone: stock gets new memory for
every large result, an accelerated model keeps it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stretto.compile.choose import MOST_STEPS
from stretto.machine.timing import Timing, as_alone, measure, memory_as, ratio
from stretto.memory import allocator
from stretto.observe.agreement import difference, worst
from stretto.observe.classify import layer_paths
from stretto.observe.put_back import put_back
from stretto.observe.trace import device_of
from stretto.observe.workload import Workload
from stretto.page.text import duration
from stretto.plug.explain import explain
from stretto.profile import in_step
from stretto.profile.call_site import Site, backward, each_tensor, indices
from stretto.profile.captured import operands
from stretto.profile.in_step import with_new_graph
from stretto.profile.words import ALIKE

if TYPE_CHECKING:
    from stretto.profile.profiling import Profile

REPEATS = 20
TIE = 1.05  # a winner leads by more than this, at the lower end of its interval
SETTLE = 5  # steps of a script in which the tuner tries its variants; few, for a script may have few
ROUNDED = 5e-3  # two predictions as near as this are told by the same digits
WHOLE = "stock, the step"
FORWARD = ", forward alone"  # behind the name of a site: its calls without gradients


def sites_of(profile: Profile) -> dict[str, Site]:
    """The layers of the model by path, each with the arguments of its first call and how many a step has.

    Two steps are looked at: what is another tensor in the second changes. Of a layer that is called several times the
    gradients of the first call are the last to come.
    """
    model = profile.workload.model
    modules = dict(model.named_modules())
    seen: dict[str, Site] = {}
    again: set[str] | None = None  # met in the second step
    handles = []
    for path in (path for path in layer_paths(model, profile.trace) if path in modules):

        def hook(module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            first = seen.get(path) or Site.of(module, args, kwargs)._replace(calls=0, new_graph=profile.new_graphs)
            if again is None:
                seen[path] = first._replace(calls=first.calls + 1)
            elif path not in again:
                again.add(path)
                seen[path] = first._replace(changing=first.others(args, kwargs))

        def answered(module: nn.Module, args: Any, out: Any, path: str = path) -> None:
            if again is not None:
                seen[path].answered(out)

        handles.append(modules[path].register_forward_pre_hook(hook, with_kwargs=True))
        handles.append(modules[path].register_forward_hook(answered))
    try:
        profile.workload.run()
        again = set()
        profile.workload.run()
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    return seen


def _layer_step(layer: nn.Module, site: Site, train: bool) -> Callable[[], object]:
    def anew(tensor: Tensor) -> Tensor:
        """Another tensor in the place of one that changes: of the same numbers, in the same memory."""
        return tensor.detach().requires_grad_(tensor.requires_grad) if id(tensor) in site.changing else tensor

    def step() -> object:
        args, kwargs = (each_tensor(inputs, anew) for inputs in (site.args, site.kwargs))
        with torch.set_grad_enabled(train):
            with site.again():
                out = layer(*args, **kwargs)
            if train:
                layer.zero_grad(set_to_none=True)
                backward(site.gradients(out))
        return out

    return step


def _in_turns(
    steps: dict[str, Callable[[], object]], repeats: int, budget: float | None, device: torch.device
) -> dict[str, Timing]:
    """Time the steps, then leave the allocator as it was."""
    with memory_as(allocator.is_kept()):
        allocator.give_back()  # large blocks kept from before would serve stock too
        return measure(steps, repeats=repeats, warmup=2, budget=budget, device=device)


def recommend(profile: Profile, *, repeats: int = REPEATS, budget: float | None = 60.0) -> list[dict[str, Any]]:
    """Advice by call site: which layers to accelerate, and what that saves."""
    workload = profile.workload
    sites = sites_of(profile)
    return layer_advice(sites, workload.mode == "train", repeats, budget, workload)


def layer_advice(
    sites: dict[str, Site], train: bool, repeats: int, budget: float | None, workload: Workload | None = None
) -> list[dict[str, Any]]:
    """Each layer alone, stock against accelerated, on the inputs it had; all of them in turns.

    workload: of the whole model, whose step is timed in the same turns; "share" of it is what a layer saves, whatever
    the machine does by the time that the advice is followed. On a card it is also timed with each layer accelerated.
    """
    from stretto.layers.layer import stock_of
    from stretto.plug.classes import fast_of

    rows: list[dict[str, Any]] = []
    steps: dict[str, Callable[[], object]] = {}
    tried: dict[str, Site] = {}
    made: set[tuple[object, ...]] = set()  # graphs that a layer before has made
    for path, site in sites.items():
        if fast_of(type(site.module)) is None:
            why = "accelerated already" if stock_of(type(site.module)) else "no fast path for this class"
            rows.append(unchanged(path, site, why))
            continue
        row = _of_layer(path, site.module)
        rows.append(row)
        own, tried[row["site"]] = _layer_steps(row["site"], site, train, made)
        steps |= own
        if workload is not None and in_step.hidden(workload.device):
            steps[in_step.name_of(row["site"])] = in_step.step_with(workload, path, site.new_graph)
    if not steps:
        return rows
    if workload is not None:
        steps[WHOLE] = as_alone(workload.run, ours=False)
    _judge(rows, tried, _in_turns(steps, repeats, budget, device_of(next(iter(sites.values()))[0])), train)
    return rows


def _layer_steps(
    name: str, site: Site, train: bool, made: set[tuple[object, ...]]
) -> tuple[dict[str, Callable[[], object]], Site]:
    """The steps of one layer that are timed, stock and accelerated, with and without gradients where it has both; and
    the site of the accelerated one, which has settled on its plans. made: graphs that are sorted already."""
    from stretto import accelerate

    steps: dict[str, Callable[[], object]] = {}
    settled: Site | None = None
    learns = train and site.calls > 0
    for extra, grads in (("", learns), (FORWARD, False))[: 2 if learns and site.forward else 1]:
        call = site.evaluation or site if extra else site
        stock = copy.deepcopy(site.module).train(grads)
        fast = accelerate(copy.deepcopy(site.module)).train(grads)
        for side, one in (("stock", stock), ("accelerated", fast)):
            steps[f"{side}, {name}{extra}"] = as_alone(_layer_step(one, call, grads), ours=one is fast)
        graph = (extra, *(id(index) for index in indices(call.args, call.kwargs)))
        key = f"accelerated, {name}{extra}"
        if site.new_graph and graph not in made:
            made.add(graph)
            steps[key] = with_new_graph(steps[key])
        for _ in range(MOST_STEPS):
            steps[key]()
        settled = settled or site._replace(module=fast)
    assert settled is not None
    return steps, settled


def _judge(rows: list[dict[str, Any]], tried: dict[str, Site], timings: dict[str, Timing], train: bool) -> None:
    """Put what the times say into the rows."""
    for row in rows:
        if f"stock, {row['site']}" in timings:
            row |= _judged(timings, row["site"], tried[row["site"]])
            row["plans"] = _plans(tried[row["site"]], row["speedup"][0], train and row["calls"] > 0)
    if WHOLE in timings:
        for row in rows:
            changed = timings.get(in_step.name_of(row["site"]))
            if changed is not None:
                row |= in_step.gain(row, timings[WHOLE], changed)
        set_shares(rows, timings[WHOLE].median)


def set_shares(rows: list[dict[str, Any]], step_seconds: float) -> None:
    """What each layer saves as a share of the step. Alone, layers may find less free memory than in a step, or a busier
    machine; they are no more than all of it."""
    known = [row for row in rows if "stock_ms" in row]
    whole = max(step_seconds * 1e3, sum(row["stock_ms"] for row in known if "in_step" not in row))
    for row in known:
        row["share"] = row["saves_ms"] / whole if whole else 0.0


def _of_layer(path: str, layer: nn.Module) -> dict[str, Any]:
    return {"site": path or "model", "kind": "layer", "now": type(layer).__name__}


def unchanged(path: str, site: Site, why: str) -> dict[str, Any]:
    """The row of advice for a layer that is left as it is, with the reason."""
    same = {"best": "as it is", "advice": "nothing to gain", "reason": why, "saves_ms": 0.0, "share": 0.0}
    return _of_layer(path, site.module) | same


def verdict(low: float, high: float) -> str:
    """What an interval of a ratio says, in words that follow it; "" for a gain."""
    if low > TIE:
        return ""
    return ": slower" if high < 1 else ": a tie" if low <= 1 else ": too little to count"


def _judged(timings: dict[str, Timing], site: str, tried: Site) -> dict[str, Any]:
    """What the times of one layer say; what it saves is for all its calls in a step."""
    slow, fast = timings[f"stock, {site}"], timings[f"accelerated, {site}"]
    times, low, high = ratio(slow, fast)
    better = low > TIE
    calls, forward = tried.calls, tried.forward
    sides = {"stock": slow.median, "accelerated": fast.median}
    spent = {}  # ms of all its calls in a step; where no gradient comes back to any, that is what was timed
    for side, learning in sides.items():
        extra = timings.get(f"{side}, {site}{FORWARD}")
        spent[side] = (learning * calls + (learning if extra is None else extra.median) * forward) * 1e3
    saves = max(0.0, spent["stock"] - spent["accelerated"]) if better else 0.0
    often = f", called {calls:.3g} times a step" if calls not in (0, 1) else ""
    often += f", {forward:.3g} time{'s' * (forward != 1)} a step without gradients" if forward else ""
    often += ", every step with another graph" if tried.new_graph else ""
    return {
        "best": "stretto.accelerate" if better else "as it is",
        "advice": "accelerate" if better else "nothing to gain",
        "speedup": (times, low, high),
        "saves_ms": saves,
        "stock_ms": spent["stock"],
        "calls": calls,
        "forward": forward,
        "reason": f"{times:.2f}x ({low:.2f}-{high:.2f}) alone, on its own inputs" + verdict(low, high) + often,
        "stock": slow.to_dict(),
        "accelerated": fast.to_dict(),
    }


def _plans(site: Site, speedup: float, train: bool) -> list[dict[str, Any]]:
    """The plans of an accelerated layer, each with its speed-up over stock: of the one that runs as it was measured, of
    the others as the compiler has them beside that one, by measurement where they were tried. A plan of which
    the same is predicted as of the one that runs has no speed-up of its own: nobody has seen it run.
    """
    layer, args, kwargs = site[:3]
    with torch.set_grad_enabled(train), site.again():
        candidates = [c for told in explain(layer, *args, **kwargs).layers[:1] for c in told.candidates]
    runs = next((c for c in candidates if c.chosen), None)
    if runs is None:
        return []
    result = []
    for c in candidates:
        both = None not in (c.measured_ms, runs.measured_ms)
        mine, usual = (c.measured_ms, runs.measured_ms) if both else (c.predicted_ms, runs.predicted_ms)
        times = speedup if c is runs else speedup * usual / mine if mine and usual else None
        known = "measured" if both or c is runs else "predicted"
        if known == "predicted" and mine and usual and math.isclose(mine, usual, rel_tol=ROUNDED):
            times, known = None, ALIKE
        result.append({"plan": c.plan, "runs": c.chosen, "speedup": times, "by": known})
    return result


def outputs(workload: Workload) -> list[Tensor]:
    """What the model gives in evaluation mode, every tensor of it."""
    with put_back(workload.model), torch.no_grad():
        torch.manual_seed(0)
        workload.model.eval()
        return operands(workload._forward())


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
    fast = workload.copied()
    accelerate_sites(fast.model, chosen)
    before, after = outputs(workload), outputs(fast)
    reason = difference(before, after)
    if reason:
        predicted = sum(row["saves_ms"] for row in chosen)
        return {"applied": False, "reason": f"not applied: {reason}", "predicted_ms": predicted}
    run = with_new_graph(fast.run) if profile.new_graphs else fast.run
    for _ in range(MOST_STEPS):
        run()
    steps = {"stock": as_alone(workload.run, ours=False), "accelerated": as_alone(run, ours=True)}
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
    took = f"{duration(stock.median)} before, {duration(fast.median)} after"
    said = f"{layers} accelerated: the step is {seen}, {took}"
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
