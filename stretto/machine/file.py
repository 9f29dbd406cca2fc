"""What a machine can do, measured or given: the numbers that turn counted work into time.

probing.py measures the rates of this machine, observe/this_machine.py what ops, layers and processes add. A file with
the same fields describes a machine one does not have.

Rates are given twice: near, where the op finds its operands in a cache because it has just used them, and far, where
other work has driven them out to memory. How much other work that takes is a curve too (`cache`). A file may give one
rate for both. Ceilings, which no op exceeds, are fields of their own: ceilings.py.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from numbers import Real
from pathlib import Path
from typing import Any

from stretto import files
from stretto.errors import expect, fail

Curve = Sequence[tuple[float, ...]]  # (size, near, far) or (size, rate)
Table = Sequence[tuple[float, ...]]  # (row, span, near, far) or (row, span, rate)


@dataclass
class Machine:
    """Rates are per second. Curves and tables are looked up on a log scale, linear in between."""

    name: str = "this machine"
    device: str = "cpu"
    threads: int = 1
    memory: float = 8e9
    launch: float = 2e-6  # seconds of one op that does nothing
    host: float = 1e-5  # seconds of Python, autograd and dispatcher around an op of a model, views included
    host_far: float = 1.5e-5  # the same where the step's data drive code and objects out of the caches
    kernel: float = 5e-5  # seconds of Python around one of stretto's kernels, beyond an op's
    kernel_far: float = 8e-5
    cache: Curve = ((1e6, 0.0), (1e8, 1.0))  # (bytes touched since, share of the way from near to far)
    gemm: Table = ((1e6, 64, 2e10), (1e9, 64, 5e10))  # (flops, smallest dimension, flop/s)
    own_gemm: Table = ()  # the same of products that stretto's own kernels may take; empty: as the others
    stream: Curve = ((1e5, 2e10), (1e8, 1e10))  # (bytes, byte/s) of an elementwise op
    gather: Table = ((256, 1e7, 5e9),)  # (row bytes, table bytes, byte/s of rows read)
    scatter: Table = ((256, 1e7, 1e9),)  # rows added up
    scatter_max: Table = ((256, 1e7, 1e9),)  # rows reduced by max, min or product
    spmm: Table = ((256, 1e7, 8e9),)
    attention: Curve = ((100, 1e9), (1000, 4e9))  # (flops per edge, flop/s) of the fused kernel
    attention_grad: Curve = ((100, 1e9), (1000, 4e9))
    reduce: Curve = ((1e5, 5e9),)  # (bytes, byte/s) of a sum over rows
    reduce_last: Curve = ((32, 5e9),)  # (bytes of one sum, byte/s) of sums along the last dimension
    softmax: Curve = ((8, 1e8), (64, 5e8))  # (values of a row, values/s)
    softmax_grad: Curve = ()  # the same of its gradient; empty: as the softmax
    mask: Curve = ((1e5, 2e8),)  # (values, values/s) of finding where a mask is set
    sort: float = 2e7  # values/s
    draw: float = 2e8  # random values/s
    peak_launch: float = 0.0  # ceilings (ceilings.py): the fastest op that does nothing; 0 and empty: not measured
    peak_gemm: dict[str, float] = field(default_factory=dict)  # type -> flop/s
    peak_stream: Curve = ()  # (bytes, byte/s)
    peak_gather: Table = ()  # (row bytes, table bytes, byte/s)
    peak_draw: float = 0.0  # random values/s
    fresh: float = 4e9  # byte/s of writing memory the process did not have before: the system clears it page by page
    link_latency: float = 2e-5  # seconds of one message between workers, each of which sends one at that time
    link_bandwidth: float = 1e9  # byte/s between two workers
    link: str = "assumed"  # where these two come from: assumed, measured here, or given in a file
    beside: float = 1.0  # time of a worker's own ops while the others run, over their time alone: 1 unless they share
    hidden: float = 1.0  # share of an exchange that passes while they compute: less where their own cores carry it
    workers: int = 1  # workers that can run at once here, each with as many threads
    busy: float = 0.0  # load of the system while it was measured; a busy machine looks slower than it is

    def to_dict(self) -> dict[str, Any]:
        """As it is written to a file."""
        return asdict(self)

    @staticmethod
    def load(path: str | Path) -> Machine:
        """A machine from its JSON file."""
        file = Path(path)
        expect(file.is_file(), f"analyze: no machine file {str(file)!r}")
        try:
            content = json.loads(file.read_text())
        except (ValueError, OSError) as error:
            fail(f"analyze: machine file {file.name!r} is not JSON: {error}")
        check(content, f"analyze: machine file {file.name!r}")
        if {"link_latency", "link_bandwidth"} <= content.keys():
            content.setdefault("link", "given")
        return Machine(**content)

    def save(self, path: str | Path) -> None:
        """Write the machine file."""
        with files.replacing(Path(path)) as out:
            out.write((json.dumps(self.to_dict(), indent=1) + "\n").encode())

    def far(self, touched: float) -> float:
        """0 to 1: how far an operand has gone from the caches after so many bytes of other work."""
        return min(1.0, max(0.0, near([(size, 1 + share) for size, share in self.cache], touched) - 1))


# Fields that may be 0, or empty; of all others a 0 would be a machine that never finishes.
MAY_BE_ZERO = {"launch", "host", "host_far", "kernel", "kernel_far", "link_latency", "hidden", "busy"}
MAY_BE_ZERO |= {"peak_launch", "peak_draw"}
MAY_BE_EMPTY = ("own_gemm", "softmax_grad", "peak_gemm", "peak_stream", "peak_gather")
TABLES = ("gemm", "own_gemm", "gather", "scatter", "scatter_max", "spmm", "peak_gather")  # two sizes, then rates
WORDS = {"device": ("cpu", "cuda"), "link": ("assumed", "measured", "given")}
WHOLE = ("threads", "workers")


def check(content: Any, where: str) -> None:
    """Refuse what is no machine, in words; where: the beginning of the sentence."""
    expect(isinstance(content, dict), f"{where} is {type(content).__name__}, wanted names and values")
    plain = Machine()
    known = {f.name for f in fields(Machine)}
    for name, value in content.items():
        expect(name in known, f"{where} has {name!r}, wanted of {', '.join(sorted(known))}")
        usual = getattr(plain, name)
        if isinstance(usual, (str, bool)):
            expect(type(value) is type(usual), f"{where}: {name!r} is {value!r}, wanted a {type(usual).__name__}")
            words = WORDS.get(name, (value,))
            expect(value in words, f"{where}: {name!r} is {value!r}, wanted one of {', '.join(words)}")
        elif name == "peak_gemm":
            expect(isinstance(value, dict) and all(_positive(v) for v in value.values()), _wanted(where, name, value))
        elif isinstance(usual, (int, float)):
            fine = _number(value) and (value > 0 or (value == 0 and name in MAY_BE_ZERO))
            least = "of at least 0" if name in MAY_BE_ZERO else "above 0"
            expect(fine, f"{where}: {name!r} is {value!r}, wanted a finite number {least}")
            expect(name != "hidden" or value <= 1, f"{where}: {name!r} is {value!r}, wanted a share, 0 to 1")
            expect(name not in WHOLE or int(value) == value, f"{where}: {name!r} is {value!r}, wanted a whole number")
        else:
            _check_points(name, value, where)


def _check_points(name: str, value: Any, where: str) -> None:
    expect(isinstance(value, (list, tuple)), _wanted(where, name, value))
    expect(bool(value) or name in MAY_BE_EMPTY, f"{where}: {name!r} is empty, wanted at least one point")
    sizes = 2 if name in TABLES else 1
    for point in value:
        fine = isinstance(point, (list, tuple)) and sizes < len(point) <= sizes + 2 and all(map(_number, point))
        rates = point[sizes:] if fine else ()
        least = min(rates, default=-1.0)
        fine = fine and (0 <= least <= max(rates) <= 1 if name == "cache" else least > 0)
        wanted = "a size and then a share, 0 to 1" if name == "cache" else f"{sizes} sizes and then rates above 0"
        expect(fine, f"{where}: {name!r} has {point!r}, wanted {wanted}")


def _number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _positive(value: Any) -> bool:
    return _number(value) and value > 0


def _wanted(where: str, name: str, value: Any) -> str:
    return f"{where}: {name!r} is {value!r}, wanted points as stretto analyze --save-machine writes them"


def _rate(rates: tuple[float, ...], far: float) -> float:
    """The rate of something a share `far` of which comes from memory."""
    return 1 / ((1 - far) / rates[0] + far / rates[-1])


def near(curve: Curve, size: float, far: float = 0.0) -> float:
    """The rate at the nearest size of a curve, on a log scale, linear in between."""
    points = sorted((math.log(max(point[0], 1.0)), _rate(point[1:], far)) for point in curve)
    at = math.log(max(size, 1.0))
    if at <= points[0][0]:
        return points[0][1]
    for (low, first), (high, second) in itertools.pairwise(points):
        if at <= high:
            return first + (second - first) * (at - low) / (high - low)
    return points[-1][1]


def near_row(table: Table, row: float, span: float, far: float = 0.0) -> float:
    """The rate of a table at the nearest span, between rows as in `near`."""
    spans = {point[1] for point in table}
    closest = min(spans, key=lambda s: abs(math.log(max(s, 1.0)) - math.log(max(span, 1.0))))
    return near([(point[0], *point[2:]) for point in table if point[1] == closest], row, far)
