"""Every environment variable of stretto, its default and meaning, on one page.

Values are read when asked for, not at import, so that a test or a notebook can change them. One that is not taken is a
StrettoError in whatever asks for it first.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from stretto.errors import fail


class Variable(NamedTuple):
    """One of them. takes: its words (empty: as if it were not set), or a function that tells what is wanted."""

    default: str
    meaning: str
    takes: tuple[str, ...] | Callable[[str], str]


def _anything(value: str) -> str:
    return ""


def _whole_number(value: str) -> str:
    return "" if re.fullmatch(r"[0-9]{1,18}", value) else "an integer >= 0"


def _number_or_nothing(value: str) -> str:
    return "" if not value or not _whole_number(value) else "an integer >= 0, or nothing"


def _folder_or_nothing(value: str) -> str:
    return "" if not value or Path(value).is_dir() else "a folder that is there"


VARIABLES = {
    "STRETTO_DISABLE": Variable("0", "1: accelerate() and patch() change nothing", ("0", "1")),
    "STRETTO_CPU": Variable(
        "",
        "instruction set of the CPU kernels: baseline, avx2, avx512; empty: the best this CPU has",
        _anything,  # the library knows which ones it has
    ),
    "STRETTO_LIBRARY": Variable(
        "",
        "path of libstretto, instead of the one in the package or under build/",
        _anything,  # kernels/native.py tells what is wrong with it
    ),
    "STRETTO_NATIVE": Variable("1", "0: do not load libstretto, run the plain-PyTorch reference kernels", ("0", "1")),
    "STRETTO_INDEX": Variable("auto", "index type inside Graph: auto, int32, int64", ("auto", "int32", "int64")),
    "STRETTO_TUNE": Variable(
        "on",
        "on: measure variants once and remember; analytic: cost model only; off: documented defaults",
        ("on", "analytic", "off"),
    ),
    "STRETTO_CACHE": Variable(
        "",
        "folder of tuning results, made where it is not there; empty: $XDG_CACHE_HOME/stretto or ~/.cache/stretto",
        _anything,
    ),
    "STRETTO_GRAPH_CACHE": Variable("64", "how many graphs Graph.of remembers", _whole_number),
    "STRETTO_GRAPH_CACHE_MB": Variable(
        "1024",
        "and how many MiB they may hold, with all that derives from them; graphs in use do not count",
        _whole_number,
    ),
    "STRETTO_BACKEND": Variable(
        "stretto",
        "stretto: our kernels; torch: the same plans on torch's own dense and sparse kernels, attention and edge "
        "messages composed of torch's operations",
        ("stretto", "torch"),
    ),
    "STRETTO_PLAN": Variable(
        "best",
        "best: the cheapest plan; stock: the order of evaluation stock PyG uses, for comparison",
        ("best", "stock"),
    ),
    "STRETTO_SHADOW": Variable(
        "0",
        "N > 0: every N calls of a layer run stock beside it, forward and backward; fall back, loudly, on mismatch",
        _whole_number,
    ),
    "STRETTO_HOIST_MB": Variable("1024", "memory budget for products A X kept across steps, in MiB", _whole_number),
    "STRETTO_POOL_MB": Variable(
        "",
        "MiB of large CPU results kept to be written again; empty: a sixteenth of the memory",
        _number_or_nothing,
    ),
    "STRETTO_MALLOC": Variable(
        "keep",
        "keep: freed memory stays with the process while a model is accelerated; leave",
        ("keep", "leave"),
    ),
    "STRETTO_PAGES": Variable(
        "large",
        "large: arrays that are gathered from live in 2 MiB pages where Linux lends them; leave",
        ("large", "leave"),
    ),
    "STRETTO_SCRIPT": Variable(
        "",
        "set by python -m stretto SCRIPT for the processes that the script spawns; not for users",
        _anything,  # running it tells
    ),
    "STRETTO_DATA": Variable(
        "",
        "folder of further .npz graphs; empty: ../shared/data beside the checkout, if it is there",
        _folder_or_nothing,
    ),
    "STRETTO_COMMIT": Variable(
        "", "what rows of stretto bench name as their commit where there is no checkout to ask", _anything
    ),
}


# os.environ decodes at every look-up, which is felt in a layer's call: its own table is looked at instead.
_TABLE = vars(os.environ)["_data"]
_KEYS = {name: os.environ.encodekey(name) for name in VARIABLES}
_BACKEND, _STRETTO, _TORCH = _KEYS["STRETTO_BACKEND"], *map(os.environ.encodevalue, ("stretto", "torch"))
_checked: dict[tuple[str, Any], str] = {}  # (name, what stands in the table) -> the same, decoded and known to be right


def get(name: str) -> str:
    """The variable's value, checked, or its default."""
    variable = VARIABLES.get(name)
    if variable is None:
        fail(f"settings: unknown variable {name!r}, wanted one of {', '.join(VARIABLES)}")
    raw = _TABLE.get(_KEYS[name])
    if raw is None:
        return variable.default
    known = _checked.get((name, raw))
    if known is not None:
        return known
    value, takes = os.environ.decodevalue(raw), variable.takes
    if callable(takes):
        wanted = takes(value)
    else:
        value = value or variable.default
        wanted = "" if value in takes else f"one of {', '.join(map(repr, takes))}"
    if wanted:
        fail(f"{name}={value!r}: wanted {wanted}")
    if takes is not _folder_or_nothing:  # a folder may go
        _checked[name, raw] = value
    return value


_DECIDING = tuple(
    _KEYS[f"STRETTO_{name}"] for name in ("PLAN", "BACKEND", "SHADOW", "TUNE", "HOIST_MB", "NATIVE", "CPU", "INDEX")
)


def deciding() -> tuple[bytes | None, ...]:
    """The variables that decide how a layer runs, as they are: to compare with what they were."""
    return tuple(map(_TABLE.get, _DECIDING))


def torch_kernels() -> bool:
    """Whether STRETTO_BACKEND=torch: no kernel of ours runs."""
    raw = _TABLE.get(_BACKEND)
    return raw is not None and raw != _STRETTO and (raw == _TORCH or get("STRETTO_BACKEND") == "torch")


def tuning() -> bool:
    """Whether candidates may be measured."""
    return get("STRETTO_TUNE") == "on"


def integer(name: str) -> int:
    """The variable's value as an integer."""
    return int(get(name))


def flag(name: str) -> bool:
    """Whether the variable is 1."""
    return get(name) == "1"


def cache_folder() -> Path:
    """Where tuning results live. Not created here."""
    if get("STRETTO_CACHE"):
        return Path(get("STRETTO_CACHE"))
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if root else Path.home() / ".cache") / "stretto"
