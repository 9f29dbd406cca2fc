"""Every environment variable of stretto, its default and meaning, on one page.

Values are read when asked for, not at import, so that a test or a notebook can change them.
"""

import os
from pathlib import Path

from stretto.errors import fail

# name -> (default, meaning)
VARIABLES = {
    "STRETTO_DISABLE": ("0", "1: accelerate() and patch() change nothing"),
    "STRETTO_CPU": ("", "instruction set of the CPU kernels: baseline, avx2, avx512; empty: the best this CPU has"),
    "STRETTO_LIBRARY": ("", "path of libstretto, instead of the one in the package or under build/"),
    "STRETTO_NATIVE": ("1", "0: do not load libstretto, run the plain-PyTorch reference kernels"),
    "STRETTO_INDEX": ("auto", "index type inside Graph: auto, int32, int64"),
    "STRETTO_TUNE": (
        "on",
        "on: measure variants once and remember; full: on, and torch.compile of each stock layer is tried too, which "
        "takes seconds to minutes; analytic: cost model only; off: documented defaults",
    ),
    "STRETTO_CACHE": ("", "folder of tuning results; empty: $XDG_CACHE_HOME/stretto or ~/.cache/stretto"),
    "STRETTO_GRAPH_CACHE": ("64", "how many graphs Graph.of remembers"),
    "STRETTO_GRAPH_CACHE_MB": ("1024", "and how many MiB of edge_index they may stand for; graphs in use do not count"),
    "STRETTO_BACKEND": (
        "stretto",
        "stretto: our kernels; torch: the same plans on torch's own dense and sparse kernels, attention and edge "
        "messages composed of torch's operations",
    ),
    "STRETTO_PLAN": ("best", "best: the cheapest plan; stock: the order of evaluation stock PyG uses, for comparison"),
    "STRETTO_SHADOW": (
        "0",
        "N > 0: every N calls of a layer run stock beside it, forward and backward; fall back, loudly, on mismatch",
    ),
    "STRETTO_HOIST_MB": ("1024", "memory budget for products A X kept across steps, in MiB"),
    "STRETTO_POOL_MB": ("", "MiB of large CPU results kept to be written again; empty: a sixteenth of the memory"),
    "STRETTO_MALLOC": ("keep", "keep: freed memory stays with the process while a model is accelerated; leave"),
    "STRETTO_PAGES": (
        "large",
        "large: arrays that are gathered from live in 2 MiB pages where Linux lends them; leave",
    ),
    "STRETTO_SCRIPT": ("", "set by python -m stretto SCRIPT for the processes that the script spawns; not for users"),
    "STRETTO_DATA": ("", "folder of further .npz graphs; empty: ../shared/data beside the checkout, if it is there"),
}


# os.environ decodes at every look-up, which is felt in a layer's call: its own table is looked at instead.
_TABLE = vars(os.environ)["_data"]
_KEYS = {name: os.environ.encodekey(name) for name in VARIABLES}
_TORCH = os.environ.encodevalue("torch")


def get(name: str) -> str:
    """The variable's value, or its default."""
    if name not in VARIABLES:
        fail(f"settings: unknown variable {name!r}, wanted one of {', '.join(VARIABLES)}")
    value = _TABLE.get(_KEYS[name])
    return VARIABLES[name][0] if value is None else os.environ.decodevalue(value)


def choice(name: str, allowed: tuple[str, ...]) -> str:
    """The variable's value, checked against the allowed ones."""
    value = get(name)
    if value not in allowed:
        fail(f"{name}={value!r}: wanted one of {', '.join(repr(a) for a in allowed)}")
    return value


_DECIDING = tuple(
    _KEYS[f"STRETTO_{name}"] for name in ("PLAN", "BACKEND", "SHADOW", "TUNE", "HOIST_MB", "NATIVE", "CPU", "INDEX")
)


def deciding() -> tuple[bytes | None, ...]:
    """The variables that decide how a layer runs, as they are: to compare with what they were."""
    return tuple(map(_TABLE.get, _DECIDING))


def torch_kernels() -> bool:
    """Whether STRETTO_BACKEND=torch: no kernel of ours runs."""
    return _TABLE.get(_KEYS["STRETTO_BACKEND"]) == _TORCH


def tuning() -> bool:
    """Whether candidates may be measured."""
    return choice("STRETTO_TUNE", ("on", "full", "analytic", "off")) in ("on", "full")


def integer(name: str, *, least: int = 0) -> int:
    """The variable's value as an integer >= least."""
    value = get(name)
    if not value.lstrip("-").isdigit() or int(value) < least:
        fail(f"{name}={value!r}: wanted an integer >= {least}")
    return int(value)


def flag(name: str) -> bool:
    """Whether the variable is set to something other than 0 or nothing."""
    return get(name) not in ("", "0")


def cache_folder() -> Path:
    """Where tuning results live. Not created here."""
    if get("STRETTO_CACHE"):
        return Path(get("STRETTO_CACHE"))
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if root else Path.home() / ".cache") / "stretto"
