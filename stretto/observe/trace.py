"""Every op of a step: what it was called with, where in the model, forward or backward, its cost, memory and time.

A TorchDispatchMode sees ATen ops below autograd, and stretto's kernels through their backend. A backward op is joined
to the forward op it differentiates by autograd's sequence numbers, and so to the module that called it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.machine.timing import waiter
from stretto.observe import costs, kernel_costs, locality
from stretto.observe.nested import mapped
from stretto.observe.scratch import cast_bytes, scratch_bytes
from stretto.observe.specs import Spec, describe, matrices, storage_key, tensors
from stretto.observe.watched_kernels import watched_kernels
from stretto.ops.cost import Cost

# Under a dispatch mode autograd's formulas add out of place; a plain step writes into zeros it has just made. So does
# a watched one: op -> (the formulas that do so, what they run in a plain step, its arguments beyond the op's own).
aten = torch.ops.aten
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
CHOSEN = ("MaxBackward0", "MinBackward0", "SortBackward0", "SortBackward1", "MedianBackward1", "KthvalueBackward0",
          "ModeBackward0", "TopkBackward0")  # fmt: skip
IN_PLACE: dict[str, tuple[tuple[str, ...], Any, tuple[Any, ...]]] = {
    "aten::index_add": (("IndexSelectBackward0",), aten.index_add_.default, ()),
    "aten::scatter_add": (("GatherBackward0",), aten.scatter_add_.default, ()),
    "aten::index_put": (("IndexBackward0",), aten._index_put_impl_.default, (True,)),
    "aten::scatter.src": (CHOSEN, aten.scatter_.src, ()),
}


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are; a model without any is on the processor."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


@dataclass
class OpRecord:
    """One call of one op."""

    index: int
    name: str  # "aten::mm", "stretto::spmm"
    path: str  # the module, "convs.0.lin"; "" outside any
    phase: str  # forward, backward, optimizer
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    tags: frozenset[str]
    is_view: bool
    site: int | None  # of a backward op: the forward op that it differentiates
    deps: tuple[int, ...]  # ops that made its inputs
    cost: Cost
    close: float = 1.0  # of rows at places that an index names, the share used shortly before or next to the last
    seconds: float = 0.0  # in the pass whose parts add up to the step
    typical: float = 0.0  # median over all passes
    calls: tuple[tuple[str, int], ...] = ()  # modules that it ran inside, each with the number of its call
    runs: str = ""  # on a processor, where ops take memory for themselves: "kernel" (ours) or "aten"

    @property
    def base(self) -> str:
        """The name without its library, its overload and the mark of an op in place: "aten::add_.Tensor" -> "add"."""
        return self.name.partition("::")[2].partition(".")[0].strip("_")

    @property
    def ours(self) -> bool:
        """Whether it is one of stretto's kernels."""
        return self.name.startswith("stretto::")

    @property
    def inputs(self) -> list[Spec]:
        """Every tensor that came in."""
        return tensors((self.args, self.kwargs))

    @property
    def outputs(self) -> list[Spec]:
        """Every tensor that came out."""
        return tensors(self.out)

    @property
    def shapes(self) -> str:
        """Shapes of the dense inputs, "2708x1433, 1433x16"; where none is, of the matrices: "10x10 of 30" entries."""
        if not self.inputs:
            result = matrices((self.args, self.kwargs))
            return ", ".join(f"{m.num_rows}x{m.num_cols} of {m.num_edges}" for m in result)
        return ", ".join("x".join(map(str, spec.shape)) or "scalar" for spec in self.inputs)

    @property
    def scratch(self) -> Any:
        """Bytes that it takes for itself and gives back before it returns."""
        if self.runs == "kernel":
            return scratch_bytes(self.name, self.args)
        return cast_bytes(self.name, self.inputs, self.outputs) if self.runs == "aten" else 0

    def recount(self) -> Cost:
        """The cost, counted from the sizes that the record holds now."""
        if self.ours:
            return kernel_costs.of_kernel(self.name, self.args, self.kwargs, self.out)
        return costs.of_aten(self.name, self.tags, self.is_view, self.args, self.kwargs, self.out)


@dataclass
class Trace:
    """A step's ops in the order they ran; memory taken and given back; time of the gaps between ops."""

    ops: list[OpRecord] = field(default_factory=list)
    takes: list[tuple[int, int, Spec | None, int]] = field(default_factory=list)  # (op, storage, tensor, bytes)
    gives: list[tuple[int, int]] = field(default_factory=list)  # (op, storage)
    peak_bytes: int = 0  # of what the step allocated; parameters and inputs not included
    classes: dict[str, str] = field(default_factory=dict)  # module path -> class
    host: dict[tuple[str, str], float] = field(default_factory=dict)  # (path, phase) -> seconds between ops
    step_seconds: float = 0.0  # plain step, without the tracer
    traced_seconds: float = 0.0  # step under the tracer
    tracer_seconds: float = 0.0  # of which the tracer's own
    tail_seconds: float = 0.0  # after the last op and autograd's end: what no op and no module accounts for

    def __iter__(self) -> Iterator[OpRecord]:
        return iter(self.ops)

    @property
    def flops(self) -> Any:
        """Of the whole step."""
        return sum(op.cost.flops for op in self.ops)

    @property
    def bytes(self) -> Any:
        """Compulsory bytes of the whole step."""
        return sum(op.cost.bytes for op in self.ops)

    @property
    def launches(self) -> int:
        """Ops that do something: neither views nor bare allocations."""
        return sum(op.cost.family != "view" for op in self.ops)

    @property
    def unknown(self) -> list[str]:
        """Names of the ops that no formula covers."""
        return sorted({op.name for op in self.ops if not op.cost.known})

    @property
    def op_seconds(self) -> float:
        """Time inside ops."""
        return sum(op.seconds for op in self.ops)

    @property
    def host_seconds(self) -> float:
        """Time between ops in the traced step: Python, autograd, the dispatcher, and what a tracer makes of them."""
        return sum(self.host.values())

    @property
    def in_ops(self) -> float:
        """Time inside ops as a share of the plain step; the rest is Python, autograd and the dispatcher."""
        return min(1.0, self.op_seconds / self.step_seconds) if self.step_seconds else 0.0

    @property
    def attributed(self) -> float:
        """Share of the traced step, less the tracer's own work, that an op or a module's host code accounts for."""
        net = self.traced_seconds - self.tracer_seconds
        return min(1.0, (self.op_seconds + self.host_seconds) / net) if net > 0 else 1.0


class Recorder(TorchDispatchMode):
    """Records the ops run under it. full: everything but time; otherwise time only, in the least overhead.

    device: where the ops run, unless the model tells; on a card each is waited for.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        full: bool = True,
        capture: frozenset[int] = frozenset(),
        device: torch.device | None = None,
    ) -> None:
        begin: Callable[[], None] = super().__init__
        begin()
        self.full, self.capture = full, capture
        self.phase = "forward"
        self.trace = Trace()
        self.captured: dict[int, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}  # op -> (function, args, kwargs)
        self.times: list[tuple[str, float, float]] = []  # (op, seconds, seconds since the op before)
        self.own = 0.0  # seconds of the tracer itself
        self.ending = 0.0  # seconds that autograd took to end, after its last op
        self._names: dict[int, str] = {}
        self._stack: list[tuple[str, int]] = []  # modules, and which of their calls
        self._again: list[bool] = []  # of each module of the stack: whether it is called in a backward pass
        self._calls: dict[str, int] = {}
        self._inside = False
        self._producer: dict[int, int] = {}
        self._sites: dict[int, tuple[int, str]] = {}  # sequence number -> (op, path)
        self._alive: dict[int, Any] = {}
        self._live = 0
        self._count = 0
        self._last = 0.0
        if model is not None:
            self._name(model, "")
            device = device_of(model) if device is None else device
        self._sync = waiter(device or "cpu")

    def _name(self, module: nn.Module, prefix: str) -> None:
        for name, child in module.named_modules(prefix=prefix):
            self._names[id(child)] = name
            self.trace.classes[name] = type(child).__name__

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Watch modules and kernels, and record until the end of the block."""
        with ExitStack() as stack:
            handles = (
                register_module_forward_pre_hook(self._enter_module),
                register_module_forward_hook(self._leave_module, always_call=True),
            )
            for handle in handles:
                stack.callback(handle.remove)
            stack.enter_context(watched_kernels(self.call))
            stack.enter_context(self)
            self._last = start = time.perf_counter()
            yield self
            end = time.perf_counter()
            self.trace.traced_seconds, self.trace.tail_seconds = end - start, end - self._last
            self.trace.tracer_seconds = self.own
        self._alive.clear()

    def backward_ended(self) -> None:
        """Autograd has returned: what passed since its last op was its own work, on a card that of a thread's end."""
        now = time.perf_counter()
        self.ending, self._last = now - self._last, now

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if id(module) not in self._names:  # a script's model: its first call names it
            self._name(module, type(module).__name__ if not self._stack else f"{self._stack[-1][0]}.?")
        name = self._names[id(module)]
        if self._stack and not name.startswith(self._stack[-1][0]):  # a module shared by several: as seen from this one
            name = f"{self._stack[-1][0]}.{name.rpartition('.')[2]}"
        self._calls[name] = self._calls.get(name, 0) + 1
        self._stack.append((name, self._calls[name]))
        self._again.append(torch._C._current_autograd_node() is not None)

    def _leave_module(self, module: nn.Module, args: Any, out: Any) -> None:
        if self._stack:
            self._stack.pop()
            self._again.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.name(), kwargs or {}
        if torch.is_inference_mode_enabled() and torch._C._dispatch_has_kernel_for_dispatch_key(name, COMPOSITE):
            with self:  # composite ops arrive whole there: what they run is what is watched
                return func._op_dk(COMPOSITE, *args, **kwargs)
        if name in IN_PLACE and not kwargs and not torch.is_grad_enabled():
            formulas, plain, more = IN_PLACE[name]
            node = torch._C._current_autograd_node()
            if node is not None and node.name() in formulas:
                func, args, name = plain, (*args, *more), plain.name()
        return self.call(func, name, args, kwargs, func)

    def call(self, function: Any, name: str, args: Any, kwargs: Any, schema: Any) -> Any:
        """Run one op and record it; ops inside one of our kernels belong to the kernel."""
        if self._inside:
            return function(*args, **kwargs)
        entered = time.perf_counter()
        where = self._where() if self.full else ("", "", None)
        saved = (describe(args), describe(kwargs)) if self.full else None
        deps = self._deps(args, kwargs) if self.full else ()
        if self._count in self.capture:
            self._inside = True  # copies are no part of the step
            self.captured[self._count] = (function, mapped(args, _copied), mapped(kwargs, _copied))
        self._inside = schema is None
        if self._sync is not None:
            self._sync()
        # Torch ops inside one of our kernels run at their own speed: they are not handed to Python one by one.
        with torch._C._DisableTorchDispatch() if schema is None else nullcontext():
            start = time.perf_counter()
            try:
                out = function(*args, **kwargs)
                if self._sync is not None:
                    self._sync()
            finally:
                self._inside = False
            end = time.perf_counter()
        if saved is not None:
            self._record(name, where, saved, deps, args, out, schema)
        else:
            self.times.append((name, end - start, entered - self._last))
        self._count += 1
        self._last = time.perf_counter()
        self.own += self._last - entered - (end - start)
        return out

    def _where(self) -> tuple[str, str, int | None]:
        """Module, phase and, in the backward pass, the forward op that is being differentiated.

        A module that is called in the backward pass (torch.utils.checkpoint) computes again what the forward pass did.
        """
        node = torch._C._current_autograd_node()
        if node is None:
            return (self._stack[-1][0] if self._stack else ""), self.phase, None
        if self._again and self._again[-1]:
            return self._stack[-1][0], "backward", None
        site, path = self._sites.get(node._sequence_nr(), (None, ""))
        return path, "backward", site

    def _deps(self, args: Any, kwargs: Any) -> tuple[int, ...]:
        result = {self._producer.get(spec.key) for spec in tensors((describe(args), describe(kwargs)))}
        return tuple(sorted(i for i in result if i is not None))

    def _record(
        self, name: str, where: tuple[str, str, int | None], inputs: Any, deps: Any, args: Any, out: Any, schema: Any
    ) -> None:
        """Note a call that has run. inputs: its arguments, described before it; schema: None of our kernels."""
        path, phase, site = where
        tags, is_view = (frozenset(), False) if schema is None else _declared(schema)
        call, number = (*inputs, describe(out)), len(self.trace.ops)
        record = OpRecord(number, name, path, phase, call[0], call[1], call[2], tags, is_view, site, deps, Cost("?"))
        record.cost, record.calls = record.recount(), tuple(self._stack)
        if record.cost.random:
            self._inside = True  # looking at an index is no part of the step
            index = locality.index_of(args)
            record.close = 1.0 if index is None else locality.closeness(index, float(record.cost.row))
            self._inside = False
        if phase != "backward" or (self._again and self._again[-1]):
            number = torch._C._autograd._get_sequence_nr() - 1
            self._sites.setdefault(number, (record.index, path))
        self.trace.ops.append(record)
        self._made(record, out)
        record.runs = "" if self._sync is not None else "kernel" if schema is None else "aten"
        self.trace.peak_bytes = max(self.trace.peak_bytes, self._live + record.scratch)

    def _made(self, record: OpRecord, out: Any) -> None:
        """Who made which memory, and how much of it is new."""
        results = [t for t in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(t, Tensor)]
        made = [
            (t, spec, storage_key(t))
            for t, spec in zip(results, tensors(record.out), strict=False)
            if t.layout == torch.strided
        ]
        if record.is_view:  # before any is noted: unbind and chunk have several outputs on one storage
            before = {self._producer[key] for *_, key in made if key in self._producer}
            record.deps = tuple(sorted({*record.deps, *before}))
        for tensor, spec, key in made:
            self._producer[key] = record.index
            if not record.is_view:
                self._take(tensor, spec, key, record.index)

    def _take(self, tensor: Tensor, spec: Spec, key: int, index: int) -> None:
        """Count a new storage until it is freed."""
        if key in self._alive or not key:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        trace, number = self.trace, len(self.trace.takes)
        whole = spec if size == spec.numel * spec.itemsize else None
        trace.takes.append((index, number, whole, size))
        self._live += size
        trace.peak_bytes = max(trace.peak_bytes, self._live)

        def gone(_: Any) -> None:
            if self._alive.pop(key, None) is not None:
                self._live -= size
                trace.gives.append((len(trace.ops), number))

        self._alive[key] = weakref.ref(storage, gone)


def _declared(schema: Any) -> tuple[frozenset[str], bool]:
    """The tags of an ATen op, and whether what it returns lies in the memory of an argument."""
    tags = frozenset(str(tag).partition(".")[2] for tag in schema.tags)
    aliases = [r.alias_info for r in schema._schema.returns if r.alias_info is not None]
    return tags, any(not alias.is_write for alias in aliases)


def _copied(leaf: Any) -> Any:
    """A copy of a tensor, for ops that write to their inputs and memory that is reused; anything else as it is."""
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
        return leaf
    # An expanded tensor stays expanded: kernels read its one entry again and again.
    sizes = zip(leaf.shape, leaf.stride(), strict=True)
    whole = tuple(slice(0, 1) if not step and size else slice(None) for size, step in sizes)
    return leaf.detach()[whole].clone().expand(leaf.shape)
