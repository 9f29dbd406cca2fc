"""Looks at the steps of a script, one by one, until enough of them were alike."""

from __future__ import annotations

from contextlib import ExitStack
from functools import wraps
from typing import Any

from stretto.observe.trace import Recorder, Trace
from stretto.observe.workload import ATTEMPTS, same_ops
from stretto.profile.rounds import Makeup
from stretto.profile.script_steps import WARMUP, Enough, Steps

PATIENCE = 4  # times the steps wanted: so many may pass before another step is traced in full


class Watcher(Steps):
    """One step traced in full, then plain and timed ones in turns; only those of one makeup are compared."""

    def __init__(self, repeats: int) -> None:
        super().__init__()
        self.repeats = repeats
        self.plain: list[tuple[Makeup, float]] = []
        self.passes: list[tuple[Makeup, Recorder]] = []
        self.fulls: list[tuple[Makeup, Recorder]] = []
        self.current: Recorder | None = None
        self._asked = 0  # calls of closures in this step
        self._warm = 0  # in the steps to warm up in which calls of layers are counted
        self._asked_in: dict[int, int] = {}  # id of a trace -> calls of closures in its step
        self._since = 0  # steps since the last one in full
        self._stack = ExitStack()

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        super().before(optimizer, args, kwargs)
        if self.current is not None:
            self.current.phase = "optimizer"
        # A closure is the model again: LBFGS calls it as often as it likes. The first of args is the optimizer.
        return tuple(map(self._as_forward, args)), {name: self._as_forward(v) for name, v in kwargs.items()}

    def _as_forward(self, value: Any) -> Any:
        """A closure that runs as the forward pass it is, and leaves the optimizer to go on; anything else as it is."""
        if not callable(value):
            return value
        recorder = self.current

        @wraps(value)
        def closure(*args: Any, **kwargs: Any) -> Any:
            self._asked += 1
            if recorder is None:
                return value(*args, **kwargs)
            recorder.phase = "forward"
            try:
                return value(*args, **kwargs)
            finally:
                recorder.phase = "optimizer"

        return closure

    def closures(self, trace: Trace) -> float:
        """How often a step like the traced one calls its closure, over how often those to warm up did: LBFGS ends a
        step early when little changes any more. 1 without a closure, or with several optimizers."""
        now = self._asked_in.get(id(trace), 0)
        return now * WARMUP / self._warm if now and self._warm and len(self.rounds.kinds) == 1 else 1.0

    @property
    def has_closures(self) -> bool:
        """Whether an optimizer was given one."""
        return any(self._asked_in.values())

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.current is not None:
            self.current.phase = "forward"  # of the next model of the round
        super().after(optimizer, args, kwargs)

    def restart(self) -> None:
        self._stack.close()
        self.current, self._since = None, 0
        self.plain, self.passes, self.fulls = [], [], []
        self._asked, self._warm, self._asked_in = 0, 0, {}
        super().restart()

    def ended(self, seconds: float) -> None:
        self._stack.close()
        makeup = self.rounds.makeup
        self._warm += self._asked if 1 <= self.steps <= WARMUP else 0
        if self.current is not None:
            self._asked_in[id(self.current.trace)] = self._asked
            _after_backward(self.current.trace)
            (self.fulls if self.current.full else self.passes).append((makeup, self.current))
        elif self.fulls:
            self.plain.append((makeup, seconds))
        self.current, self._asked = None, 0

    def begins(self) -> None:
        if self.fulls and self._served() >= self.repeats:
            raise Enough
        full = not self.fulls or self._since >= PATIENCE * self.repeats  # the last was an odd step: another one
        if full and len(self.fulls) == ATTEMPTS:
            raise Enough
        self._since = 0 if full else self._since + 1
        if full or len(self.passes) < len(self.plain):
            self.current = Recorder(self.model, full=full, device=self.device)
            self._stack = ExitStack()
            self._stack.enter_context(self.current.recording())
            if not self.by_optimizer:  # the call of the first model is under way
                self.current._enter_module(self._roots[0], ())

    def _served(self) -> int:
        """Pairs of plain and timed steps that the best of the full ones has; 0 if none of them ran the same ops."""
        trace, passes, plain = self.seen()
        return min(len(passes), len(plain)) if any(same_ops(trace, p) for p in passes) else 0

    def seen(self) -> tuple[Trace, list[Recorder], list[float]]:
        """The trace that most steps were like, with timed and plain ones of its makeup."""

        def alike(full: tuple[Makeup, Recorder]) -> int:
            return sum(makeup == full[0] and same_ops(full[1].trace, p) for makeup, p in self.passes)

        makeup, best = max(self.fulls, key=alike)
        return (
            best.trace,
            [p for made, p in self.passes if made == makeup],
            [seconds for made, seconds in self.plain if made == makeup],
        )

    def close(self) -> None:
        self._stack.close()
        super().close()


def _after_backward(trace: Trace) -> None:
    """What a step does with its gradients once they are there (clips them, undoes their scale) is of its update."""
    last = max((op.index for op in trace if op.phase == "backward"), default=len(trace.ops))
    for op in trace.ops[last + 1 :]:
        if op.phase == "forward" and not op.path:
            op.phase = "optimizer"
