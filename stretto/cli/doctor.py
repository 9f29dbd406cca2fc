"""`stretto doctor`: what is installed, which kernels run, and whether they are right; ready to paste into an issue."""

import json as jsonlib
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from stretto import datasets, kernels, settings
from stretto.graph import Graph
from stretto.kernels import native
from stretto.machine import facts as machine
from stretto.machine import rates as profile
from stretto.machine.timing import Timing, measure, settle
from stretto.observe.agreement import LIMITS, relative_error
from stretto.ops import OPS, Kernel, Sample

SMALL = "rmat:8:1500"  # where every op is called
LARGER, WIDTH = "rmat:12:40000", 64  # where one is timed
SCALES = ("row_scale", "col_scale")  # constants of a graph: in fp32 at least, and without gradients


def examine() -> dict[str, object]:
    """Everything the doctor looks at, as plain values."""
    return {
        "machine": {k: v for k, v in machine.facts().items() if k in ("cpu", "cores", "memory_gib", "system")},
        "versions": machine.versions(),
        "cuda": gpu(),
        "library": {
            "loaded": native.library() is not None,
            "path": _short(native.location()),
            "why_not": native.why_not(),
        },
        "isa": {"chosen": native.isa(), "available": native.isas()},
        "threads": {"number": torch.get_num_threads(), "runtime": native.threads_runtime()},
        "settings": {name: os.environ[name] for name in settings.VARIABLES if name in os.environ},
        "cache": cache(settings.cache_folder()),
        "smoke_test": smoke_test(),
    }


def gpu() -> str:
    """The GPU, its memory, who runs its kernels, and what was calibrated of it."""
    if not torch.cuda.is_available():
        return "none"
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    free, total = torch.cuda.mem_get_info()
    runs = kernels.name_of(torch.device("cuda"))
    found = f"{facts.name}, {facts.major}.{facts.minor}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, "
    found += f"kernels: {runs}" if runs == "triton" else "kernels: plain PyTorch, since Triton is not installed"
    rates = profile.known(torch.device("cuda"))
    if rates is None:
        return f"{found}; not calibrated yet"
    return (
        f"{found}; copies {rates.stream / 1e12:.2f} TB/s, GEMM {rates.gemm / 1e12:.1f} TFLOP/s, "
        f"a call {rates.call * 1e6:.0f} us, one of ours {rates.spmm_call * 1e6:.0f} us"
    )


def cache(folder: Path) -> dict[str, object]:
    """State of the folder of tuning results."""
    files = [f for f in folder.rglob("*") if f.is_file()] if folder.is_dir() else []
    nearest = next(p for p in (folder, *folder.parents) if p.exists())
    return {
        "folder": _short(str(folder)),
        "exists": folder.is_dir(),
        "writable": os.access(nearest, os.W_OK),
        "files": len(files),
        "bytes": sum(f.stat().st_size for f in files),
    }


def smoke_test() -> dict[str, object]:
    """Every op beside its reference on a small graph, and the time of one of them beside the same in plain PyTorch."""
    data = datasets.load_graph(SMALL)
    graph = Graph.of(data.edge_index, data.num_nodes)
    allowed = LIMITS["f32"]
    try:
        errors = [(difference(op, sample), f"{op.name} {sample}") for op in OPS.values() for sample in calls(op, graph)]
        timings = race()
    except (RuntimeError, ValueError, OSError) as failure:
        return {"ok": False, "reason": f"{type(failure).__name__}: {failure}"}
    error, call = max(errors)
    return {
        "ok": error <= allowed,
        "reason": "" if error <= allowed else f"{call}: relative error {error:.1e}, allowed {allowed:.0e}",
        "what": f"{len(errors)} calls of {len(OPS)} ops on {SMALL}, forward and backward",
        "error": error,
        "allowed": allowed,
        "timed": f"spmm forward and backward, {LARGER}, width {WIDTH}",
        "ms": timings["stretto"].median * 1e3,
        "stock_ms": timings["plain PyTorch"].median * 1e3,
    }


def calls(op: Kernel, graph: Graph) -> Iterator[Sample]:
    """The calls that the op's declaration has, from the same random numbers each time."""
    torch.manual_seed(0)
    yield from op.samples(graph, torch.float32)


def difference(op: Kernel, sample: Sample) -> float:
    """Relative error of an op's result and gradients against its reference in fp64; infinite where there is none."""
    ours, wanted = outcome(op.function, sample, torch.float32), outcome(op.reference, sample, torch.float64)
    error = relative_error(ours, wanted)
    return error if math.isfinite(error) else math.inf


def outcome(function: Callable[..., Tensor], sample: Sample, dtype: torch.dtype) -> Tensor:
    """Result and gradients of a call whose numbers are in `dtype`, in one row."""
    leaves: list[Tensor] = []

    def cast(value: object) -> object:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        leaves.append(value.detach().to(dtype, copy=True).requires_grad_())
        return leaves[-1]

    result = function(*map(cast, sample.args), **{k: v if k in SCALES else cast(v) for k, v in sample.kwargs.items()})
    flow = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view_as(result)
    gradients = torch.autograd.grad(result, leaves, flow, allow_unused=True, materialize_grads=True)
    return torch.cat([t.detach().reshape(-1).double() for t in (result, *gradients)])


def race() -> dict[str, Timing]:
    """A sum over neighbours, forward and backward: ours, and the same in plain PyTorch."""
    data = datasets.load_graph(LARGER)
    graph, x = Graph.of(data.edge_index, data.num_nodes), torch.randn(data.num_nodes, WIDTH, requires_grad=True)

    def step(function: Callable[..., Tensor]) -> None:
        function(graph, x).sum().backward()
        x.grad = None

    both = {"stretto": OPS["spmm"].function, "plain PyTorch": OPS["spmm"].reference}
    steps = {name: partial(step, function) for name, function in both.items()}
    settle(steps["stretto"])
    return measure(steps, repeats=5, warmup=2, sample_seconds=0.02)


def lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """(subject, text) for each thing found."""
    where, library, isa, threads, folder, smoke = (
        found[k] for k in ("machine", "library", "isa", "threads", "cache", "smoke_test")
    )
    state = "exists" if folder["exists"] else "not made yet"
    state += ", writable" if folder["writable"] else ", NOT writable"
    return [
        ("machine", f"{where['cpu']}, {where['cores']} cores, {where['memory_gib']} GiB, {where['system']}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in found["versions"].items())),
        ("cuda", found["cuda"]),
        ("library", library["path"] if library["loaded"] else f"not loaded: {library['why_not']}"),
        ("isa", f"{isa['chosen']} (available: {', '.join(isa['available']) or 'none'})"),
        ("threads", f"{threads['number']}, run by {threads['runtime']}"),
        ("settings", ", ".join(f"{k}={v}" for k, v in found["settings"].items()) or "all at their defaults"),
        ("cache", f"{folder['folder']}: {state}, {folder['files']} files, {folder['bytes']} bytes"),
        ("smoke test", _smoke_line(smoke)),
    ]


def _smoke_line(smoke: dict[str, Any]) -> str:
    if not smoke["ok"]:
        return f"FAILED: {smoke['reason']}"
    times = f"{smoke['timed']}: {smoke['ms']:.2f} ms, plain PyTorch {smoke['stock_ms']:.2f} ms"
    return f"ok: {smoke['what']}: error {smoke['error']:.1e} (allowed {smoke['allowed']:.0e}); {times}"


def _short(path: str) -> str:
    """The path with the home folder as ~."""
    home = str(Path.home())
    return "~" + path[len(home) :] if len(home) > 1 and path.startswith(home + os.sep) else path


def command(json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """What is installed, which kernels run, and whether they are right. Paste it into an issue."""
    found = examine()
    if json:
        typer.echo(jsonlib.dumps(found, indent=1))
    else:
        for subject, text in lines(found):
            typer.echo(f"{subject:<11} {text}")
    smoke = found["smoke_test"]
    if not (isinstance(smoke, dict) and smoke["ok"]):
        raise typer.Exit(1)
