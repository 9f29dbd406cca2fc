"""A computation written down as it runs, forward and backward, and run again with other tensors: a Program.

On a small graph a layer takes as long as the Python between its kernels. What it does there follows from the shapes,
types and layouts of its inputs: written down once, operations of torch and calls into libstretto alike, it is a
straight line of calls of C, compiled as one Python function each way. Nothing that was read from values may be in it:
who looks at a value, or reads memory that is neither an input's, nor made on the way, nor the graph's own, is refused,
and every program is compared with what it was written from, on other values, before it is used. A GCN layer makes 22
Python calls forward and 22 backward, where it made 171 and 111 (`stretto bench latency`).
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.graph import Graph
from stretto.kernels import cpu_chain, cpu_edge, native, on_host
from stretto.kernels.abi import SIGNATURES
from stretto.kernels.csr import Csr
from stretto.recording import recorder

aten: Any = torch.ops.aten
LOOKS = {aten._local_scalar_dense, aten.nonzero, aten.unique_dim, aten._unique2, aten.masked_select, aten.equal}
SAME = {aten.detach, aten.alias}  # of autograd's making: the tensor itself, where nobody differentiates
# Functions of libstretto that take fields packed side by side, and how.
PACKED = {
    "stretto_edge_messages": cpu_edge.MESSAGES,
    "stretto_chain": cpu_chain.STAGE,
    "stretto_chain_grad": cpu_chain.STAGE,
}
Maybe = Tensor | None


@dataclass
class Line:
    """One call: its text, and the numbers of the tensors that it reads and makes."""

    text: str
    reads: list[int]
    makes: list[int] = field(default_factory=list)


class Writer(TorchDispatchMode):
    """Writes down what torch and libstretto are asked for."""

    def __init__(self, inputs: Sequence[Tensor], graphs: Iterable[Graph]) -> None:
        begin: Any = super().__init__
        begin()
        self.slots: list[Tensor] = []  # kept alive while writing, so that an address is one tensor's
        self.known: dict[tuple[Any, ...], int] = {}
        self.own = {_key(t): t for graph in graphs for t in owned(graph)}
        self.matrices: dict[int, Csr] = {}  # by the addresses of their C structs
        self.constants: list[Any] = []
        self.lines: list[Line] = []
        self.random = False
        self.looked_at: list[tuple[Tensor, int, int]] = []  # tensors, their versions and addresses
        self.why = ""  # this is no program
        self.inputs = [self.add(t) for t in inputs]

    def refuse(self, why: str) -> None:
        """From now on it is known that this is no program."""
        self.why = self.why or why

    def add(self, t: Tensor) -> int:
        """The number of a tensor that is an input or was made on the way."""
        self.slots.append(t)
        self.known[_key(t)] = len(self.slots) - 1
        return len(self.slots) - 1

    def number(self, t: Tensor) -> int:
        """The number of a tensor that should be known."""
        number = self.known.get(_key(t))
        if number is None:
            self.refuse(f"a tensor of shape {list(t.shape)} came from nowhere")
            return 0
        return number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func.overloadpacket
        if self.why:
            return out
        if not all(_strided(value) for value in (*args, *kwargs.values(), out)):
            self.refuse(f"{packet} has to do with a tensor that is not plain")
        elif packet in LOOKS or _shaped_by_values(func, args):
            self.refuse(f"{packet} looks at values")
        elif packet in SAME:
            self.slots.append(out)  # its key is that of its argument
        else:
            self.random |= torch.Tag.nondeterministic_seeded in func.tags
            self._operation(func, args, kwargs, out)
        return out

    def _operation(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        reads: list[int] = []
        words = [self._argument(v, reads) for v in args]
        words += [f"{name}={self._argument(v, reads)}" for name, v in kwargs.items()]
        call = f"{self._constant(func._op)}({', '.join(words)})"
        several = isinstance(out, (tuple, list))
        results = list(out) if several else [out]
        if all(any(r is a for a in (*args, *kwargs.values())) for r in results):
            self.lines.append(Line(call, reads))  # in place
            return
        makes = [self.add(r) for r in results if isinstance(r, Tensor)]
        names = [f"v{self.known[_key(r)]}" if isinstance(r, Tensor) else "_" for r in results]
        self.lines.append(Line(f"{', '.join(names)}{',' if several else ''} = {call}", reads, makes))

    def _argument(self, value: Any, reads: list[int]) -> str:
        """An argument of an operation, as the program writes it."""
        if isinstance(value, Tensor):
            number = self.known.get(_key(value))
            if number is not None:
                reads.append(number)
                return f"v{number}"
            own = self.own.get(_key(value))
            if own is None:
                self.refuse(f"a tensor of shape {list(value.shape)} is neither an input nor the graph's")
            return self._constant(own)
        if isinstance(value, (list, tuple)):
            return f"[{', '.join([self._argument(v, reads) for v in value])}]"
        return repr(value) if value is None or type(value) in (bool, int, str) else self._constant(value)

    def _constant(self, value: Any) -> str:
        """The name of something that stays as it is."""
        for k, known in enumerate(self.constants):
            if known is value:
                return f"c{k}"
        self.constants.append(value)
        return f"c{len(self.constants) - 1}"

    def native(self, name: str, function: Any, arguments: Sequence[Any]) -> None:
        """A call into libstretto."""
        reads: list[int] = []
        words = [self._word(name, c, v, reads) for c, v in zip(SIGNATURES[name], arguments, strict=True)]
        self.lines.append(Line(f"if ({self._constant(function)}({', '.join(words)}) or 0) < 0: failed()", reads))

    def _word(self, name: str, code: str, value: Any, reads: list[int]) -> str:
        if value is None or isinstance(value, (bool, float)) or (isinstance(value, int) and (code != "p" or not value)):
            return repr(value) if not isinstance(value, float) or math.isfinite(value) else self._constant(value)
        if isinstance(value, int):
            return self._address(name, value, reads)
        if isinstance(value, bytes) and name in PACKED:
            return self._packed(name, PACKED[name], value, reads)
        fields = getattr(value, "_obj", None)  # of ctypes.byref
        if not isinstance(fields, ctypes.Structure):
            self.refuse(f"{name} takes a {type(value).__name__}")
            return "None"
        words = []
        for field_name, kind, *_ in fields._fields_:
            inner = getattr(fields, field_name)
            if kind is ctypes.c_void_p and inner:
                words.append(self._address(name, inner, reads))
            elif inner is None or isinstance(inner, (int, float)):
                words.append(self._word(name, "", inner, reads))
            else:
                words.append(self._constant(inner))
        return f"byref({self._constant(type(fields))}({', '.join(words)}))"

    def _packed(self, name: str, packing: Any, value: bytes, reads: list[int]) -> str:
        """Fields packed side by side, once or several times."""
        parts = []
        for at in range(0, len(value), packing.size):
            fields = zip(_codes(packing.format), packing.unpack(value[at : at + packing.size]), strict=True)
            words = [self._word(name, "p" if code == "P" else "", v, reads) for code, v in fields]
            parts.append(f"{self._constant(packing.pack)}({', '.join(words)})")
        return " + ".join(parts)

    def _address(self, name: str, address: int, reads: list[int]) -> str:
        csr = self.matrices.get(address)
        if csr is not None:
            self._constant(csr)  # kept alive
            return str(address)
        for t in reversed(self.slots):
            if _holds(t, address):
                number = self.known[_key(t)]
                reads.append(number)
                return _plus(f"v{number}.data_ptr()", address - t.data_ptr())
        for t in self.own.values():
            if _holds(t, address):
                return _plus(f"{self._constant(t)}.data_ptr()", address - t.data_ptr())
        self.refuse(f"{name} reads memory that is neither an input's nor the graph's")
        return "None"

    def expect_finite(self, t: Tensor) -> None:
        """The program runs only where the sum of this tensor is finite; else Unfit is raised."""
        number = self.number(t)
        self.lines.append(Line(f"if not isfinite(total(v{number}).item()): raise Unfit", [number]))


class Unfit(Exception):
    """Raised by a program before it has done anything: these inputs are not for it."""


class Program:
    """What was written down: forward(*inputs) -> (result, *saved), backward(grad, *saved) -> gradients."""

    def __init__(self, writer: Writer, middle: int, out: Tensor, grad: Maybe, gradients: Sequence[Maybe]) -> None:
        lines, backward = writer.lines[:middle], writer.lines[middle:]
        result = writer.number(out)
        made = [None if g is None else writer.number(g) for g in gradients]
        came = [] if grad is None else [writer.number(grad)]
        self.saved = _read_again(backward, came, made) if came else []
        self.reads_result = self._shares_result(writer, out)
        self.inputs_read = [n for n in self.saved if n < len(writer.inputs)]
        names = {f"c{k}": value for k, value in enumerate(writer.constants)} | GIVEN
        self.looked_at = writer.looked_at
        inner = [n for n in self.saved if n >= len(writer.inputs)]
        first = f"own(v{result})" if out._is_view() else f"v{result}"  # torch forbids to edit views of results in place
        ends = [first, *(f"v{n}" for n in inner)]
        self.forward = _function(writer.inputs, lines, ends, {result, *inner}, names)
        wanted = ["None" if n is None else f"v{n}" for n in made]
        self.backward = _function([*came, *self.saved], backward, wanted, set(made), names)

    def _shares_result(self, writer: Writer, out: Tensor) -> bool:
        """Whether backward reads the memory of the result; refuses what cannot be put right then."""
        storages = {_storage(writer.slots[n]) for n in self.saved if n not in writer.inputs}
        if any(_storage(out) == _storage(t) for t in writer.slots[: len(writer.inputs)]):
            writer.refuse("the result shares memory with an input")
        shares = _storage(out) in storages
        if shares and writer.random:
            writer.refuse("backward reads a result that depends on random numbers")
        return shares


def _read_again(backward: list[Line], came: list[int], made: list[int | None]) -> list[int]:
    """The numbers of what backward reads and does not make."""
    own = {*came, *(n for line in backward for n in line.makes)}
    read = [*(n for line in backward for n in line.reads), *(n for n in made if n is not None)]
    return sorted(set(read) - own)


def _function(
    inputs: list[int], lines: list[Line], ends: list[str], read_at_end: set[Any], names: dict[str, Any]
) -> Callable[..., Any]:
    """The lines as a function; what is not read any more is let go."""
    last = {n: k for k, line in enumerate(lines) for n in (*line.reads, *line.makes)}
    body = []
    for k, line in enumerate(lines):
        done = [
            f"v{n}" for n in {*line.reads, *line.makes} if last[n] == k and n not in read_at_end and n not in inputs
        ]
        body += [line.text, *([f"del {', '.join(done)}"] if done else [])]
    body.append(f"return ({', '.join(ends)}{',' if ends else ''})")
    text = f"def run({', '.join(f'v{n}' for n in inputs)}):\n" + "".join(f"    {line}\n" for line in body)
    scope = dict(names)
    exec(compile(text, "<a bound step of stretto>", "exec"), scope)
    run: Callable[..., Any] = scope["run"]
    return run


def _codes(packing: str) -> list[str]:
    """The code of every field: "2q P" -> q, q, P."""
    result = re.findall(r"(\d*)([a-zA-Z])", packing)
    return [code for count, code in result for _ in range(int(count or 1))]


def _own(t: Tensor) -> Tensor:
    """The same memory as a tensor that is no view."""
    return torch.empty(0, dtype=t.dtype).set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride())


def _failed() -> None:
    native.check(-1)


def _plus(name: str, offset: int) -> str:
    return f"{name} + {offset}" if offset else name


def _shaped_by_values(func: Any, args: Any) -> bool:
    """Whether values decide how large a result is: sizes that are written down would not be those of other values."""
    if torch.Tag.data_dependent_output in func.tags:
        return True
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    masks = (torch.bool, torch.uint8)  # of index.Tensor; places, however many, make as large a result
    return func.overloadpacket is not aten.index or any(t is not None and t.dtype in masks for t in args[1])


def _strided(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.layout is torch.strided and on_host(value)
    return all(map(_strided, value)) if isinstance(value, (list, tuple)) else True


def _key(t: Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.shape, t.stride(), t.dtype


def _storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _holds(t: Tensor, address: int) -> bool:
    values = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    return t.data_ptr() <= address < t.data_ptr() + values * t.element_size()


# What a program may name beside its constants.
GIVEN: dict[str, Any] = {
    "byref": ctypes.byref,
    "failed": _failed,
    "own": _own,
    "isfinite": math.isfinite,
    "total": torch.sum,
    "Unfit": Unfit,
}


def owned(graph: Graph, seen: set[int] | None = None) -> list[Tensor]:
    """The tensors of a graph and of those derived from it, which stay as they are as long as it lives."""
    seen = set() if seen is None else seen
    if id(graph) in seen:
        return []
    seen.add(id(graph))
    derived = list(graph._derived.values())
    result = [v for v in (*derived, *vars(graph).values()) if isinstance(v, Tensor)]
    for csr in {id(c): c for c in (*vars(graph).values(), *derived) if isinstance(c, Csr)}.values():
        result += [t for t in (csr.rowptr, csr.col, csr.edge_id) if t is not None]
        scale = csr.cache.get("scale")
        if scale is not None and scale[2] and any(scale[0]() is v for v in result):
            result.append(scale[2][0])
    for inner in (*vars(graph).values(), *derived):
        if isinstance(inner, Graph):
            result += owned(inner, seen)
    return result


def write(
    function: Callable[[], Any], inputs: Sequence[Tensor], graphs: Iterable[Graph]
) -> tuple[Any, Program | None, str]:
    """function()'s result, the Program of it and of its backward pass, or None and why there is none.

    function: computes one tensor from inputs and graphs alone. Its backward pass runs once more than the user asks for.
    """
    writer = Writer(inputs, graphs)
    before, recorder.program = recorder.program, writer
    try:
        with writer:
            out = function()
        if not isinstance(out, Tensor):
            return out, None, "the result is no tensor"
        middle, grad = len(writer.lines), None
        gradients: list[Maybe] = [None] * len(inputs)
        if out.requires_grad and not writer.why:
            grad = torch.ones_like(out, memory_format=torch.contiguous_format, requires_grad=False)
            writer.add(grad)
            wanted = [k for k, t in enumerate(inputs) if t.requires_grad]
            with writer:
                result = torch.autograd.grad(
                    out, [inputs[k] for k in wanted], grad, retain_graph=True, allow_unused=True
                )
            for k, g in zip(wanted, result, strict=True):
                gradients[k] = g
    finally:
        recorder.program = before
    if writer.why:
        return out, None, writer.why
    program = Program(writer, middle, out, grad, gradients)
    return out, None if writer.why else program, writer.why
