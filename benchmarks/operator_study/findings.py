"""The three findings of the operator study, as statements with the numbers of this machine: true or false here."""

from dataclasses import dataclass
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.operator_study.cell import SAME, SETTINGS, SKIPPED, SPARSITIES, Cell, run
from benchmarks.operator_study.cells import cells
from benchmarks.suites import results
from benchmarks.suites.case import OURS
from stretto.errors import fail
from stretto.machine.timing import ratio
from stretto.machine.timing import threads as limited
from stretto.page.terminal import progress


@dataclass(frozen=True)
class Finding:
    """A statement of the study and what was found here."""

    statement: str
    holds: bool
    numbers: str


def sparsity_effect(cell: Cell, name: str) -> float | None:
    """How many times faster the op is with 99 % zeros than with none (or than with the fewest there are)."""
    known = [s for s in SPARSITIES if (s, name) in cell.timings]
    if len(known) < 2:
        return None
    return cell.timings[known[0], name].median / cell.timings[known[-1], name].median


STATEMENTS = 3


def findings(done: list[Cell]) -> list[Finding]:
    """The statements, judged on the cells that ran."""
    return [f for f in (_locality(done), _native(done), _oblivious(done)) if f is not None]


def _locality(done: list[Cell]) -> Finding | None:
    """Memory access decides more than sparsity does."""
    by_shape: dict[tuple[str, str], dict[int, float]] = {}
    effects = []
    for cell in done:
        if cell.op in ("index_select", "gather") and cell.factor == 1 and (0.0, cell.op) in cell.timings:
            by_shape.setdefault((cell.op, cell.shape), {})[cell.dim] = cell.timings[0.0, cell.op].median
            effect = sparsity_effect(cell, cell.op)
            effects += [max(effect, 1 / effect)] if effect else []
    axis = {key: max(times.values()) / min(times.values()) for key, times in by_shape.items() if len(times) > 1}
    if not axis or not effects:
        return None
    # The largest of each is told, but the middle judges: of many ratios some are far from 1 by chance alone.
    (op, shape), maximum = max(axis.items(), key=lambda item: item[1])
    usual = median(axis.values())
    text = (
        f"the index dimension changes gathers {usual:.1f}x in the middle and {maximum:.1f}x at most "
        f"({op} on the {shape}), sparsity {median(effects):.2f}x in the middle and {max(effects):.2f}x at most"
    )
    return Finding("memory inefficiency dominates over sparsity", usual > (1 + SAME) * median(effects), text)


NATIVE, OTHERS = ("torch", "torch.sparse.mm"), ("PyG", "torch_scatter", "torch_sparse")


def _native(done: list[Cell]) -> Finding | None:
    """Ops of torch itself match or beat PyG's at low to moderate sparsity."""
    wins = total = 0
    for cell in done:
        pairs = [(s, native, other) for s in SPARSITIES[:3] for native in NATIVE for other in OTHERS]
        for sparsity, native, other in pairs:
            if (sparsity, native) in cell.timings and (sparsity, other) in cell.timings:
                total += 1
                times, _, _ = ratio(cell.timings[sparsity, other], cell.timings[sparsity, native])
                wins += times >= 1 - SAME
    if not total:
        return None
    text = f"torch as fast or faster in {wins} of {total} comparisons with up to 90 % zeros"
    return Finding("native ops often match or beat PyG's at low to moderate sparsity", wins * 2 >= total, text)


def _oblivious(done: list[Cell]) -> Finding | None:
    """Many central ops ignore sparsity."""
    effects: dict[str, list[float]] = {}
    for cell in done:
        for name in cell.candidates:
            if not cell.structural and (effect := sparsity_effect(cell, name)) is not None:
                effects.setdefault(cell.op, []).append(effect)
    if not effects:
        return None
    flat = sorted(op for op, values in effects.items() if median(values) <= 1 + SAME)
    text = f"no benefit from 99 % zeros in {len(flat)} of {len(effects)} ops: {', '.join(flat) or 'none'}"
    for cell in done:
        times = [timing.median for timing in cell.timings.values()]
        if len(times) == len(SPARSITIES) ** 3:  # of addmm, all operands
            text += f"; {len(times)} combinations of zeros in {cell.op} differ by {max(times) / min(times) - 1:.0%}"
    return Finding("many central ops ignore sparsity", len(flat) * 2 >= len(effects), text)


def judge(
    out: Console, *, threads: int, repeats: int, only: str, device: str = "cpu"
) -> tuple[list[results.Row], bool]:
    """Run the study's cells whose label contains `only`, show them and the findings.

    -> (rows, whether ours failed)
    """
    setting = SETTINGS[device]
    labels = [cell.label for cell in cells(setting)]
    wanted = sum(only in label for label in labels)
    if not wanted:
        fail(f"operator study: no cell contains {only!r}")
    chosen = []
    with limited(threads), progress(wanted, "operator study") as step:
        for cell in cells(setting):
            if only in cell.label:
                run(cell, repeats, setting)
                cell.forget()  # all of them at once would not fit on a card
                chosen.append(cell)
                step(cell.label)
    _show(out, chosen)
    for op, reason in (SKIPPED | not_to_be_had(chosen)).items():
        out.print(f"not run: {op}: {reason}", style="dim", highlight=False, soft_wrap=True)
    result = findings(chosen)
    if only:
        part = f"{len(chosen)} of {len(labels)} cells, those that contain {only!r}"
        out.print(f"What follows is judged on a part of the study: {part}.", style="yellow", highlight=False)
        if len(result) < STATEMENTS:
            missing = f"{STATEMENTS - len(result)} of the study's {STATEMENTS} findings cannot be judged on this part."
            out.print(missing, style="yellow", highlight=False)
    for finding in result:
        word = ("TRUE" if finding.holds else "FALSE") + (" in this part" if only else " here")
        out.print(f"{word}: {finding.statement}: {finding.numbers}", soft_wrap=True, highlight=False)
    rows = [row for cell in chosen for row in rows_of(cell, threads, device)]
    return rows, any(OURS in cell.failed for cell in chosen)


def _show(out: Console, chosen: list[Cell]) -> None:
    """Every cell with its times, by share of zeros."""
    table = Table(title="milliseconds by share of zeros", title_justify="left")
    for column in ("op", "shape", "dim", "rf", "candidate", *[f"{s:.0%}" for s in SPARSITIES], "error"):
        table.add_column(column, justify="left" if column in ("op", "shape", "candidate") else "right")
    for cell in chosen:
        for name in cell.candidates:
            shown = [_milliseconds(cell, s, name) for s in SPARSITIES]
            worst = max((e for (_, n), e in cell.errors.items() if n == name), default=0.0)
            table.add_row(cell.op, cell.shape, str(cell.dim), str(cell.factor), name, *shown, f"{worst:.0e}")
    out.print(table)


def not_to_be_had(done: list[Cell]) -> dict[str, str]:
    """Candidates that are missing here -> why, and in which ops."""
    result: dict[tuple[str, str], list[str]] = {}
    for cell in done:
        for name, reason in cell.missing.items():
            ops = result.setdefault((name, reason), [])
            if cell.op not in ops:
                ops.append(cell.op)
    return {name: f"{reason} ({', '.join(ops)})" for (name, reason), ops in result.items()}


def _milliseconds(cell: Cell, sparsity: float, name: str) -> str:
    timing = cell.timings.get((sparsity, name))
    return "-" if timing is None else f"{timing.median * 1e3:.3f}"


def rows_of(cell: Cell, threads: int, device: str) -> list[results.Row]:
    """A row for every share of zeros of a cell. Stock: the first candidate that is not ours, mostly torch's own."""
    found = []
    command = f"python -m benchmarks.operator_study --only {cell.label!r}" + f" --device {device}" * (device != "cpu")
    missing = [f"{name}: {reason}" for name, reason in cell.missing.items()]
    for sparsity, zeros in dict.fromkeys((s, zeros_of(name)) for s, name in [*cell.errors, *cell.reasons]):
        mine = {n: t for (s, n), t in cell.timings.items() if (s, zeros_of(n)) == (sparsity, zeros)}
        reasons = [f"{n}: {why}" for (s, n), why in cell.reasons.items() if (s, zeros_of(n)) == (sparsity, zeros)]
        case = {
            "op": cell.op, "shape": cell.shape, "dim": cell.dim, "reduce_factor": cell.factor,
            "structural": cell.structural, "sparsity": sparsity, "zeros": zeros,
        }  # fmt: skip
        stock = next((name for name in mine if name != OURS), "")
        note = "; ".join(missing + reasons)
        figures = results.figures(mine)
        found.append(
            results.row(
                "operator_study", case, figures, command=command, threads=threads, device=device, stock=stock, note=note
            )
        )
    return found


def zeros_of(candidate: str) -> str:
    """Where other operands have zeros, as the name of a candidate has it: "addmm, zeros in B 50%, in C 0%"."""
    return candidate.partition(", zeros ")[2]
