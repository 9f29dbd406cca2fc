"""Profile a script as it is: the optimizer tells its steps apart, and it is stopped when enough is known."""

from __future__ import annotations

import runpy
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch_geometric.nn import MessagePassing

from stretto.analyze import machine_file
from stretto.analyze.machine_file import Machine
from stretto.analyze.trace import Recorder
from stretto.analyze.workload import Workload, merge_times
from stretto.errors import StrettoError, expect, fail
from stretto.profile.profiling import Profile, make
from stretto.profile.recommend import REPEATS, Site, detached, layer_advice
from stretto.tune.timing import waiter

WARMUP = 3


class _Enough(BaseException):
    """Ends the script; not an Exception, so that no handler of the script's own catches it."""


class _Script(Workload):
    """A step that only the script itself can run."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Identity(), None)

    def run(self, recorder: Recorder | None = None) -> None:
        raise StrettoError("profile: the step of a script cannot be run again here; use stretto.profile(model, data)")


class _Watcher:
    """Steps of the script: a few to warm up, one traced in full, then plain and timed ones in turns."""

    def __init__(self, repeats: int, *, plain_only: bool = False) -> None:
        self.repeats, self.plain_only = repeats, plain_only
        self.steps = 0
        self.plain: list[float] = []
        self.passes: list[Recorder] = []
        self.full: Recorder | None = None
        self.current: Recorder | None = None
        self.sites: dict[str, Site] = {}
        self._stack = ExitStack()
        self._start = 0.0
        self.device = torch.device("cpu")
        self._hooks: list[Any] = [] if plain_only else [register_module_forward_pre_hook(self._meet)]
        self._met: set[int] = set()

    def _meet(self, module: nn.Module, args: Any) -> None:
        """A layer is called for the first time: its inputs are kept from the next call on."""
        if isinstance(module, MessagePassing) and id(module) not in self._met:
            self._met.add(id(module))
            self._hooks.append(module.register_forward_pre_hook(self._keep, with_kwargs=True))

    def _keep(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module.training and not any(module is known for known, _, _ in self.sites.values()):
            self.sites[f"{type(module).__name__} {len(self.sites)}"] = (module, detached(args), detached(kwargs))

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.device = next((p.device for group in optimizer.param_groups for p in group["params"]), self.device)
        if self.current is not None:
            self.current.phase = "optimizer"

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        wait = waiter(self.device)
        if wait is not None:
            wait()
        now = time.perf_counter()
        self._stack.close()
        if self.current is not None:
            if self.current.full:
                self.full = self.current
            else:
                self.passes.append(self.current)
        elif self.steps > WARMUP and (self.full is not None or self.plain_only):
            self.plain.append(now - self._start)
        self.current = None
        self.steps += 1
        if len(self.plain) >= self.repeats and (self.plain_only or len(self.passes) >= self.repeats):
            raise _Enough
        if self.steps > WARMUP and not self.plain_only:
            self._unhook()
            if self.full is None:
                self._begin(Recorder(full=True, device=self.device))
            elif len(self.passes) < len(self.plain):
                self._begin(Recorder(full=False, device=self.device))
        self._start = time.perf_counter()

    def _begin(self, recorder: Recorder) -> None:
        self.current = recorder
        self._stack = ExitStack()
        self._stack.enter_context(recorder.recording())

    def close(self) -> None:
        self._stack.close()
        self._unhook()


def _run(script: str, arguments: list[str], watcher: _Watcher) -> None:
    before, path = sys.argv, list(sys.path)
    handles = (
        register_optimizer_step_pre_hook(watcher.before),
        register_optimizer_step_post_hook(watcher.after),
    )
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except _Enough:
        pass  # all that was wanted has been seen
    finally:
        watcher.close()
        for handle in handles:
            handle.remove()
        sys.argv, sys.path[:] = before, path


def profile_script(
    script: str, arguments: list[str], machine: Machine | str, *, repeats: int = 5, budget: float = 30.0
) -> Profile:
    """Profile the training steps of a script, then its layers alone. budget: seconds for each layer."""
    expect(Path(script).is_file(), f"profile: no script {script!r}")
    watcher = _Watcher(repeats)
    _run(script, arguments, watcher)
    if watcher.full is None or not watcher.passes:
        fail(f"profile: {script} took {watcher.steps} optimizer steps, wanted at least {WARMUP + 2 + 2 * repeats}")
    trace = watcher.full.trace
    merge_times(trace, watcher.passes, watcher.plain or [trace.traced_seconds])
    found = make(_Script(), trace, machine_file.get(machine, device=watcher.device), Path(script).name)
    found.advice = layer_advice(watcher.sites, True, REPEATS, budget)
    return found


def apply_script(profile: Profile, script: str, arguments: list[str], *, repeats: int = 5) -> dict[str, Any]:
    """Run the script once more with the plug-in on; the gain of its step."""
    from stretto import patch, unpatch

    watcher = _Watcher(repeats, plain_only=True)
    patch()
    try:
        _run(script, arguments, watcher)
    finally:
        unpatch()
    expect(bool(watcher.plain), f"profile: {script} took too few optimizer steps")
    stock, fast = profile.trace.step_seconds, statistics.median(watcher.plain)
    predicted, realised = sum(row["saves_ms"] for row in profile.advice), (stock - fast) * 1e3
    return {
        "applied": fast < stock,
        "reason": f"the whole process patched: the step is {stock / fast:.2f}x as fast",
        "speedup": (stock / fast, stock / fast, stock / fast),
        "predicted_ms": predicted,
        "realised_ms": realised,
        "agreement": realised / predicted if predicted else None,
    }
