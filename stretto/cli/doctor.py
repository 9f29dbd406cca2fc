"""`stretto doctor`: what is installed, which kernels run, and whether they are right; ready to paste into an issue."""

import json as jsonlib
import os
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.suites.case import OURS, Spec
from benchmarks.suites.foundation import SLOW
from benchmarks.suites.run import run
from stretto import kernels, settings
from stretto.kernels import native
from stretto.machine import facts as machine
from stretto.machine import rates as profile
from stretto.observe.agreement import LIMITS

SMOKE = Spec(op="spmm", graph="rmat:12:40000", width=64, direction="both")


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
    """A small spmm, forward and backward, against fp64 and beside stock."""
    spec = Spec(**{**vars(SMOKE), "threads": torch.get_num_threads()})
    try:
        result = run(spec, repeats=5, with_ceilings=(), without=SLOW)
    except (RuntimeError, ValueError, OSError) as error:
        return {"ok": False, "reason": f"{type(error).__name__}: {error}"}
    ours = next(row for row in result.rows if row.candidate == OURS)
    best = result.best_other
    return {
        "ok": ours.timing is not None,
        "reason": ours.reason,
        "what": f"spmm forward and backward, {spec.graph}, width {spec.width}, {spec.dtype}",
        "error": ours.error,
        "allowed": LIMITS[spec.dtype],
        "ms": ours.timing.median * 1e3 if ours.timing else None,
        "stock": best.candidate if best else None,
        "stock_error": best.error if best else None,
        "stock_ms": best.timing.median * 1e3 if best and best.timing else None,
    }


def lines(found: dict) -> list[tuple[str, str]]:
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


def _smoke_line(smoke: dict) -> str:
    if not smoke["ok"]:
        return f"FAILED: {smoke['reason']}"
    beside = f"; best stock, {smoke['stock']}: {smoke['stock_ms']:.2f} ms, error {smoke['stock_error']:.1e}"
    ours = f"{smoke['ms']:.2f} ms, error {smoke['error']:.1e} (allowed {smoke['allowed']:.0e})"
    return f"ok: {smoke['what']}: {ours}{beside if smoke['stock'] else ''}"


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
