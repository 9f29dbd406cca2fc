"""How results look on the console."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.suites.case import OURS
from benchmarks.suites.run import Result
from stretto.machine.timing import Timing


def show(out: Console, result: Result) -> None:
    """One result as a table, its summary, and the command that repeats it."""
    spec = result.spec
    words = [spec.op, spec.graph, f"width {spec.width}", spec.dtype, spec.reduce]
    words += [f"weight {spec.weight}"] * (spec.weight != "none") + [f"{spec.heads} heads"] * (spec.heads > 1)
    words += ["forward + backward" if spec.direction == "both" else "forward", f"{spec.threads} threads"]
    table = Table(title=escape(", ".join(words)), title_justify="left", title_style="bold")
    table.add_column("candidate")
    for column in ("median ms", "q20 - q80", "GB/s", "error", "times ours"):
        table.add_column(column, justify="right")
    for row in sorted(result.rows, key=lambda r: r.timing.median if r.timing else float("inf")):
        error = "" if row.error is None else f"{row.error:.1e}"
        if row.timing is None:
            table.add_row(row.candidate, "-", escape(row.reason), "", error, "", style="dim")
            continue
        rate = f"{result.bytes / row.timing.median / 1e9:.1f}" if result.bytes else ""
        times = f"{row.timing.median / result.ours.median:.2f}" if result.ours else ""
        style = "bold" if row.candidate == OURS else ""
        table.add_row(row.candidate, milliseconds(row.timing), spread(row.timing), rate, error, times, style=style)
    out.print(table)
    out.print(summary(result), soft_wrap=True, markup=False)
    out.print(f"repeat: {spec.command(result.repeats)}", soft_wrap=True, style="dim", highlight=False, markup=False)
    out.print()


def summary(result: Result) -> str:
    """The ratio to the best other and the shares of the ceilings, in one or two lines."""
    speedup, best = result.speedup(), result.best_other
    lines = []
    if speedup is not None and best is not None:
        times, low, high = speedup
        lines.append(f"stretto is {times:.2f}x ({low:.2f}-{high:.2f}) as fast as the best other, {best.candidate}")
    shares = result.shares()
    if shares:
        units = {"byte": "GB/s", "flop": "GFLOP/s"}
        parts = [
            f"{share:.0%} of {kind} ({result.ceilings[kind][1] / 1e9:.1f} {units[result.ceilings[kind][0]]})"
            for kind, share in shares.items()
        ]
        lines.append("share of the measured ceilings: " + ", ".join(parts))
    return "\n".join(lines or ["nothing to compare with"])


def milliseconds(timing: Timing) -> str:
    """The median, with the digits that mean something."""
    value = timing.median * 1e3
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def spread(timing: Timing) -> str:
    """The 20 % and 80 % quantiles."""
    low, high = timing.quantile(0.2) * 1e3, timing.quantile(0.8) * 1e3
    return f"{low:.1f} - {high:.1f}" if high >= 10 else f"{low:.3f} - {high:.3f}"
