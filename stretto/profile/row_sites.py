"""Hot gathers and scatters by rows, as they ran: which op, which reduction, its real index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stretto.machine.timing import threads
from stretto.observe.trace import OpRecord, Trace
from stretto.profile import candidates
from stretto.profile.axes import Point, place, values
from stretto.profile.captured import capture, is_index
from stretto.profile.contest import Pace, Trial, contest, empty_row, too_large
from stretto.profile.stock import TORCH_REDUCE

if TYPE_CHECKING:
    from stretto.profile.profiling import Group, Profile

# op -> the candidate that it is
GATHERS = {
    "index_select": "index_select", "index": "x[index]", "embedding": "embedding", "gather": "gather",
    "gather_rows": "stretto",
}  # fmt: skip
SCATTERS = {
    "index_add": "index_add_", "index_add_": "index_add_", "scatter_add": "scatter_add_",
    "scatter_add_": "scatter_add_", "scatter_reduce": "scatter_reduce_", "scatter_reduce_": "scatter_reduce_",
    "index_reduce": "index_reduce_", "index_reduce_": "index_reduce_", "index_put": "index_put_",
    "index_put_": "index_put_", "_index_put_impl_": "index_put_",
}  # fmt: skip
REDUCES = {word: reduce for reduce, word in TORCH_REDUCE.items()}
AXES = ("base", "order", "direction", "width", "dtype", "index", "edges", "nodes", "threads", "cache", "compiled")


@dataclass(frozen=True)
class Site:
    """A hot op that has candidates."""

    group: Group
    native: str  # the candidate that the model runs

    @property
    def axes(self) -> tuple[str, ...]:
        """What is moved; torch.compile is for torch's own ops."""
        return AXES[:-1] if self.native == "stretto" else AXES


@dataclass(frozen=True)
class RowSite(Site):
    """A gather from, or scatter into, a table [num_rows, width] by index [E]."""

    reduce: str
    index: Tensor
    num_rows: int
    width: int
    lasting: bool  # whether every step has this index: what is prepared from it then counts once, not in each call

    @property
    def size(self) -> int:
        """Entries of the index."""
        return self.index.numel()

    def run(self, point: Point, pace: Pace) -> list[dict[str, Any]]:
        """Every candidate at one point."""
        return run_point(
            self.group.family,
            self.index,
            self.num_rows,
            point,
            native=self.native,
            reduce=self.reduce,
            lasting=self.lasting,
            pace=pace,
        )


def run_point(
    family: str,
    index: Tensor,
    num_rows: int,
    point: Point,
    *,
    native: str = "",
    reduce: str = "sum",
    lasting: bool = True,
    repeats: int = 0,
    pace: Pace | None = None,
) -> list[dict[str, Any]]:
    """Every candidate at one point: checked against fp64, then timed in turns. One row each."""
    index, num_rows = place(index, num_rows, point)
    native = native or {"gather": "index_select"}.get(family, "index_add_" if reduce == "sum" else "scatter_reduce_")
    reason = too_large(index.numel() * point.width)
    if reason:
        return [empty_row(family, native, point, reason)]
    source = values(num_rows if family == "gather" else index.numel(), point)
    pace = pace or (Pace(repeats) if repeats else Pace())
    with threads(point.threads):
        table, skipped = candidates.FAMILIES[family](index, num_rows, reduce, lasting=lasting)
        trial = Trial(family, table, reference(family, index.long(), num_rows, reduce), source, native, skipped)
        rows = contest(trial, point, pace)
    return [{**row, "reduce": reduce, "prepared": "once" if lasting else "in every call"} for row in rows]


def reference(family: str, where: Tensor, num_rows: int, reduce: str) -> Callable[[Tensor], Tensor]:
    """x[where], or rows reduced by where into num_rows; 0 where there are none. x of any floating type."""

    def gathered(x: Tensor) -> Tensor:
        return x[where]

    def scattered(x: Tensor) -> Tensor:
        out = x.new_zeros(num_rows, x.size(1))
        if reduce == "sum":
            return out.index_add(0, where, x)
        return out.scatter_reduce(0, where[:, None].expand_as(x), x, TORCH_REDUCE[reduce], include_self=False)

    return gathered if family == "gather" else scattered


Known = tuple[str, str, Tensor, int, int]  # the candidate it is, its reduction, index [E], rows, width
WRITES = "it writes values where an index says, and reduces nothing"


def site(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Known | str:
    """What a captured gather or scatter by rows is; or why no candidate does what it does."""
    base = name.split("::")[1].split(".")[0]
    if base not in GATHERS and base not in SCATTERS:
        return WRITES if base.startswith("scatter") else "no other way to do it is known"
    table, index = args[0], _index(base, args)
    if isinstance(index, str):
        return index
    if not table.is_floating_point() or not table.dim() or not table.size(0):
        return "it moves no floating numbers"
    known = index.contiguous(), table.size(0), table.numel() // table.size(0)
    if base in GATHERS:
        return GATHERS[base], "sum", *known
    reduce = _reduction(base, args, kwargs)
    return (SCATTERS[base], reduce, *known) if reduce in REDUCES.values() else reduce


def _index(base: str, args: tuple[Any, ...]) -> Tensor | str:
    """The index [E] of rows; or why there is none."""
    if base in ("embedding", "gather_rows"):
        index = args[1].flatten()
    elif isinstance(args[1], (list, tuple)):  # x[i], x[i] += s
        if len(args[1]) != 1:
            return "it does not go by rows"
        index = args[1][0]
    else:
        if args[1] % max(1, args[0].dim()):
            return "it does not go by rows"
        index = args[2]
    if not is_index(index):
        return "it follows a mask, not an index"
    if index.dim() > 1:
        if any(index.stride(d) for d in range(1, index.dim()) if index.size(d) > 1):
            return "every value has an index of its own"
        index = index.flatten(1)[:, 0] if index.numel() else index.new_empty(0)
    if index.numel() and int(index.min()) < 0:
        return "its index counts from the end"
    return index


def _reduction(base: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """sum, mean, max or min into a table of zeros; or why it is none of them."""
    if "index_put" in base and not (len(args) > 3 and args[3]):
        return WRITES
    if kwargs.get("alpha", 1) != 1:
        return "it multiplies what it adds"
    if bool(args[0].any()):
        return "it adds to values that are there, which the candidates do not"
    if not base.rstrip("_").endswith("_reduce"):
        return "sum"
    reduce = REDUCES.get(args[4], "")
    if not reduce:
        return f"no candidate reduces by {args[4]!r}"
    if reduce != "sum" and kwargs.get("include_self", True):
        return "it counts the zeros that are there, which the candidates do not"
    return reduce


def made_in_step(trace: Trace, op: OpRecord, key: int) -> bool:
    """Whether the step itself wrote the memory (a Spec's key) that the op reads: then the next step writes it anew."""
    return any(spec.key == key for before in trace.ops[: op.index] if not before.is_view for spec in before.outputs)


def row_sites(profile: Profile, share: float) -> tuple[list[RowSite], list[tuple[Group, str]]]:
    """Hot gathers and scatters by rows with their real indices; and those that have no candidates, with the reason."""
    groups = [g for g in profile.hot(share) if g.family in candidates.FAMILIES]
    captured = capture(profile, groups) if groups else {}
    result: list[RowSite] = []
    left: list[tuple[Group, str]] = []
    for group in groups:
        at = next((op for op in group.ops if op in captured), None)
        if at is None:
            left.append((group, "the step did not run it again"))
            continue
        known = site(group.name, *captured[at][1:])
        if isinstance(known, str):
            left.append((group, known))
            continue
        native, reduce, index, num_rows, width = known
        op = profile.trace.ops[at]
        key = next(spec.key for spec in op.inputs if spec.dtype in (torch.int64, torch.int32))
        saved = not made_in_step(profile.trace, op, key)
        result.append(RowSite(group, native, reduce, index.cpu(), num_rows, width, saved))
    return result, left
