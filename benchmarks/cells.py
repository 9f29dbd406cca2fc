"""What stands in the cells of the tables: numbers as they are read, and lines that are made of several rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import median

from benchmarks.suites.results import Row, number

Cell = Callable[[Row], str]
BATCHED = [(model, kind) for model in ("sage", "gcn", "gat") for kind in ("new", "again")]
BATCHES = [", ".join(pair) for pair in BATCHED]


def text(value: float | None) -> str:
    """Three digits that mean something."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def times(value: float | None) -> str:
    """How many times as fast; a loss is bold."""
    if value is None:
        return ""
    shown = f"{value:.0f}x" if value >= 100 else f"{value:.1f}x" if value >= 10 else f"{value:.2f}x"
    return shown if value >= 1 else f"**{shown}**"


def _spread(who: str) -> Cell:
    def cell(row: Row) -> str:
        ends = [end for end in (row[f"{who}_low"], row[f"{who}_high"]) if end]
        around = f" ({' - '.join(text(float(end)) for end in ends)})" if ends else ""
        return f"{text(number(row, who))}{around}" if row[who] else ""

    return cell


ours, stock = _spread("ours"), _spread("stock")


def words(*columns: str) -> Cell:
    """Some columns side by side, numbers of few digits as they stand."""

    def shown(value: str) -> str:
        return text(float(value)) if "." in value and value.replace(".", "").isdecimal() else value

    return lambda row: " ".join(shown(row[column]) for column in columns if row[column])


def ratio(column: str) -> Cell:
    """A column that says how many times as fast."""
    return lambda row: times(number(row, column))


def over(column: str) -> Cell:
    """How many times as long as ours somebody took."""
    return lambda row: times(_over(row, column, "ours"))


def quotient(above: str, below: str) -> Cell:
    """One column over another."""
    return lambda row: times(_over(row, above, below))


def named_ratio(row: Row) -> str:
    """Over the best other, and who that is."""
    return f"{times(number(row, 'best_ratio'))} ({row['best_name']})" if row["best_ratio"] else ""


def amount(row: Row) -> str:
    """Ours with its unit, and edges a second where edges were sampled."""
    value, work = number(row, "ours"), number(row, "work")
    rate = f", {work / value / 1e3:.0f} M edges/s" if work and value and row["work_unit"] == "edges" else ""
    if row["unit"] == "ms":
        return f"{ours(row)} ms{rate}"
    return f"{text(value)} {row['unit']}"


def stock_amount(row: Row) -> str:
    """Stock with its unit."""
    if not row["stock"]:
        return ""
    return f"{stock(row)} ms" if row["unit"] == "ms" else f"{text(number(row, 'stock'))} {row['unit']}"


def compiled(rows: list[Row]) -> Iterator[list[str]]:
    """Layers of which torch.compile of stock was measured, too."""
    column = "stock torch.compile ms"
    for row in rows:
        if row[column]:
            where = [words("layer", "widths")(row), row["graph"], row["machine"]]
            yield [*where, stock(row), text(number(row, column)), ours(row), times(_over(row, column, "ours"))]


def wide(rows: list[Row]) -> Iterator[list[str]]:
    """A wide GATConv: sum first beside projection first."""
    column = "stretto, update first ms"
    for row in rows:
        if row[column]:
            told = stock(row) or row["note"].removeprefix("stock edge_index: ")
            yield [
                row["graph"],
                row["machine"],
                ours(row),
                text(number(row, column)),
                times(_over(row, column, "ours")),
                told,
            ]


def grid(rows: list[Row]) -> Iterator[list[str]]:
    """A line for each graph, training and inference: how much faster than the best stock, and plans well chosen."""
    for graph in dict.fromkeys(row["graph"] for row in rows):
        for mode in ("training", "inference"):
            mine = [row for row in rows if (row["graph"], row["mode"]) == (graph, mode)]
            ratios = sorted(r for row in mine if (r := number(row, "best_ratio")) is not None)
            several = [float(row["regret"]) for row in mine if int(row["plans"]) > 1]
            well = sum(regret <= 1.05 for regret in several)
            if ratios:
                ends = (times(ratios[0]), times(median(ratios)), times(ratios[-1]))
                yield [graph, mode, str(len(mine)), str(len(ratios)), *ends, f"{well} of {len(several)}"]


def spmm(rows: list[Row]) -> Iterator[list[str]]:
    """A line for each graph and width, both types side by side."""
    table: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        width = row["size"].split(",")[0]
        table.setdefault((row["graph"], width), [row["graph"], width]).extend([ours(row), times(number(row, "ratio"))])
    yield from table.values()


def batches(rows: list[Row]) -> Iterator[list[str]]:
    """A line for each size, ours and stock for each net, on new batches and on the same again."""
    for size in dict.fromkeys((row["nodes"], row["edges"]) for row in rows):
        line = [f"{int(size[0]):,} nodes, {int(size[1]):,} edges"]
        for pair in BATCHED:
            case = (*size, *pair)
            (row,) = [r for r in rows if (r["nodes"], r["edges"], r["model"], r["batches"]) == case]
            as_stock = ", as stock" if row["path"] == "stock" else ""
            line.append(f"{text(number(row, 'ours'))} ms, {times(number(row, 'ratio'))}{as_stock}")
        yield line


def errors(rows: list[Row]) -> Iterator[list[str]]:
    """A line for each layer: how far results and gradients are from fp64 at most."""
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        worst = max(mine, key=lambda row: float(row["ours"]) / float(row["stock"]))
        most = [f"{max(float(row[who]) for row in mine):.1e}" for who in ("ours", "stock")]
        share = f"{float(worst['ours']) / float(worst['stock']):.2f} ({worst['tensor']})"
        yield [model, str(len(mine)), *most, share]


def study(rows: list[Row]) -> Iterator[list[str]]:
    """What the operator study says of gathers: the dimension decides, zeros do not."""
    chosen = [row for row in rows if row["op"] in ("index_select", "gather") and row["reduce_factor"] == "1"]
    for op, shape in dict.fromkeys((row["op"], row["shape"]) for row in chosen):
        mine = [row for row in chosen if (row["op"], row["shape"]) == (op, shape)]
        full = {row["dim"]: float(row["stock"]) for row in mine if row["sparsity"] == "0"}
        zeros = {row["dim"]: float(row["stock"]) for row in mine if row["sparsity"] == "0.99"}
        effects = [full[dim] / zeros[dim] for dim in full if dim in zeros]
        effect = max(effects, key=lambda r: abs(math.log(r)))
        times_dim = f"{max(full.values()) / min(full.values()):.1f}x" if len(full) > 1 else ""
        yield [op, shape, " / ".join(text(value) for value in full.values()), times_dim, f"{effect:.2f}x"]


def _over(row: Row, above: str, below: str) -> float | None:
    a, b = number(row, above), number(row, below)
    return a / b if a is not None and b else None
