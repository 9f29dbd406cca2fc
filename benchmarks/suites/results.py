"""Result files: one CSV a suite, one row a case. A case that is measured again on a machine replaces its row there.

A row reads from left to right: the suite; the columns that say what was measured; medians of ours, of stock and of the
fastest other candidate, each with its quantiles; how many times ours they are; where, of which commit and by which
command; and what only this suite has to say. `load` gives rows as they stand in the file, all text.
"""

import csv
import io
import subprocess
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from stretto import settings
from stretto.errors import expect
from stretto.machine import facts
from stretto.machine.timing import Timing

Row = dict[str, str]
Figure = tuple[float, float, float]  # median, and the two quantiles around it

QUANTILES = (0.2, 0.8)
UNKNOWN = "unknown"  # what nobody wrote down
MEASURED = (
    *(f"{who}{end}" for who in ("ours", "stock", "best") for end in ("", "_low", "_high")),
    *("best_name", "ratio", "best_ratio", "unit", "quantiles"),
)
PLACE = ("machine", "threads", "torch", "pyg", "commit", "date", "command")
COMMON = (*MEASURED, *PLACE, "note")  # of every suite, after its case and before what it alone has


def figure(timing: Timing, scale: float = 1e3) -> Figure:
    """Median and quantiles of a timing, in milliseconds."""
    low, high = (timing.quantile(q) * scale for q in QUANTILES)
    return timing.median * scale, low, high


def figures(timings: Mapping[str, Timing]) -> dict[str, Figure]:
    """The figure of every candidate."""
    return {name: figure(timing) for name, timing in timings.items()}


def row(
    suite: str,
    case: Mapping[str, object],
    measured: Mapping[str, Figure],
    *,
    command: str,
    ours: str = "stretto",
    stock: str = "",
    rivals: Collection[str] | None = None,
    unit: str = "ms",
    device: str = "cpu",
    threads: int = 0,
    note: str = "",
    more: Mapping[str, object] | None = None,
) -> Row:
    """One case. measured: a figure of each candidate, some of which are ours, stock, and rivals (None: all but ours).

    threads: 0 for as many as torch uses now. more: what only this suite has to say, a column each.
    """
    others = [name for name in measured if name != ours and (rivals is None or name in rivals)]
    best = min(others, key=lambda name: measured[name][0], default="")
    found: dict[str, object] = {"suite": suite, **case}
    for who, name in (("ours", ours), ("stock", stock), ("best", best)):
        columns = (who, f"{who}_low", f"{who}_high")
        found |= dict(zip(columns, measured.get(name, ("", "", "")), strict=True))
    found["best_name"] = best
    for column, name in (("ratio", stock), ("best_ratio", best)):
        known = name in measured and ours in measured and measured[ours][0] > 0
        found[column] = measured[name][0] / measured[ours][0] if known else ""
    low, high = QUANTILES
    found |= {"unit": unit, "quantiles": f"{low:.0%} and {high:.0%}", **place(device, threads), "command": command}
    return {column: _text(value) for column, value in {**found, "note": note, **(more or {})}.items()}


def place(device: str = "cpu", threads: int = 0) -> dict[str, object]:
    """Where and of which commit something is measured now."""
    on_card = torch.device(device).type == "cuda"
    name = torch.cuda.get_device_name() if on_card else f"{facts.cpu_model()}, {facts.cores()} cores"
    versions = {"torch": torch.__version__, "pyg": metadata.version("torch_geometric")}
    today = datetime.now(tz=timezone.utc).date().isoformat()
    return {
        "machine": name,
        "threads": threads or torch.get_num_threads(),
        **versions,
        "commit": commit(),
        "date": today,
    }


@cache
def commit() -> str:
    """The commit of this checkout, with "+changes" where the library differs from it; elsewhere STRETTO_COMMIT."""
    root = Path(__file__).resolve().parents[2]

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    told = settings.get("STRETTO_COMMIT") or UNKNOWN
    if not (root / ".git").exists():  # installed, perhaps into a folder inside a repository of the user's own
        return told
    try:
        name, changed = git("rev-parse", "--short", "HEAD"), git("status", "--porcelain", "--", "stretto", "csrc")
    except (OSError, subprocess.CalledProcessError):
        return told
    return f"{name}+changes" if changed else name


def load(path: Path) -> list[Row]:
    """The rows of a file; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def save(path: Path | None, rows: Iterable[Row]) -> None:
    """Put rows into the file of a suite, in the places of those that say the same of an earlier run. None: nowhere."""
    if path is None:
        return
    table = {key(old): old for old in load(path)}
    for new in rows:
        table[key(new)] = new
    kinds = sorted({" ".join([known["suite"], *case_of(known)]) for known in table.values()})
    expect(len(kinds) <= 1, f"bench: {str(path)!r} would hold rows of several kinds: {'; '.join(kinds)}")
    columns = list(dict.fromkeys(column for known in table.values() for column in known))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(table.values())
    path.write_text(text.getvalue())


def case_of(known: Row) -> Row:
    """The columns that say what was measured."""
    columns = list(known)
    return {column: known[column] for column in columns[1 : columns.index(COMMON[0])]}


def key(known: Row) -> tuple[str, ...]:
    """What two rows have in common of which only the later is kept."""
    return known["suite"], *case_of(known).values(), known["machine"], known["threads"]


def number(known: Row, column: str) -> float | None:
    """A column as a number; None where nothing was measured."""
    return float(known[column]) if known.get(column) else None


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.5g}"
    return "" if value is None else str(value)
