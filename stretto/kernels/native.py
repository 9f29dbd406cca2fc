"""Loads libstretto (a C ABI, through ctypes), or says why not. Calls into it drop the GIL."""

from __future__ import annotations

import ctypes
import logging
import platform
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto import settings
from stretto.errors import StrettoError
from stretto.kernels.abi import SIGNATURES, declare
from stretto.recording import Recorded, recorder

logger = logging.getLogger("stretto")

_VERSION = "0.1.0"
_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_why_not = ""
_tried = False


def library() -> ctypes.CDLL | None:
    """The loaded library, or None; the reason for None is logged once and kept for why_not()."""
    global _library, _why_not, _tried
    if _tried:
        return _library
    with _lock:
        if not _tried:
            settings.flag("STRETTO_NATIVE")  # a word that it does not take is no reason to run without the library
            try:
                _library = _load()
            except (OSError, StrettoError) as error:
                _why_not = str(error)
                logger.warning("stretto: native kernels are off, plain PyTorch runs instead: %s", _why_not)
            _tried = True
    return _library


def why_not() -> str:
    """Why the library is not loaded; empty when it is."""
    library()
    return _why_not


def location() -> str:
    """Path of the loaded library, or nothing."""
    lib = library()
    return str(lib._name) if lib is not None else ""


def here() -> Any:
    """The library, which is loaded; or what writes down the calls that go to it."""
    lib = library()
    assert lib is not None
    return lib if recorder.program is None else Recorded(lib, recorder.program)


def call(name: str, *arguments: object) -> int:
    """Call a function of the ABI, tensors by their addresses; a negative status becomes a StrettoError."""
    if library() is None:
        raise StrettoError(f"{name}: libstretto is not loaded: {_why_not}")
    lib = here()
    values = list(arguments)
    for k, value in enumerate(values):  # no comprehension, which is a call of its own: mini-batches are made of these
        if isinstance(value, Tensor):
            values[k] = value.data_ptr()
    status: int | None = getattr(lib, name)(*values)
    if status is not None and status < 0:
        raise StrettoError(f"{name}: {lib.stretto_error().decode()}")
    return status or 0


def kernel(name: str, *arguments: object) -> None:
    """Call a kernel of csrc/kernels.def, tensors by their addresses, with as many threads as torch uses."""
    values = list(arguments)
    for k, value in enumerate(values):
        if isinstance(value, Tensor):
            values[k] = value.data_ptr()
    check(getattr(here(), name)(*values, torch.get_num_threads()))


def check(status: int) -> None:
    """Raise the library's last error if status is negative."""
    if status < 0:
        assert _library is not None
        raise StrettoError(_library.stretto_error().decode())


def isa() -> str:
    """Instruction set of the kernels in use, or "none"."""
    lib = library()
    return str(lib.stretto_isa().decode()) if lib is not None else "none"


def isas() -> list[str]:
    """Instruction sets this CPU and this library have, best first."""
    lib = library()
    return str(lib.stretto_isas().decode()).split() if lib is not None else []


def set_isa(name: str) -> None:
    """Use another instruction set from now on."""
    call("stretto_set_isa", name.encode())


def threads_runtime() -> str:
    """Whose threads run the kernels."""
    lib = library()
    return str(lib.stretto_threading().decode()) if lib is not None else "torch"


def _load() -> ctypes.CDLL:
    if not settings.flag("STRETTO_NATIVE"):
        raise StrettoError("STRETTO_NATIVE=0")
    torch.get_num_threads()  # torch's OpenMP runtime must be in the process before ours looks for it
    lib = ctypes.CDLL(str(_find()))
    for name in SIGNATURES:
        if not hasattr(lib, name):
            raise StrettoError(f"{lib._name} lacks {name}: built from other sources, rebuild it")
        declare(getattr(lib, name), name)
    found = lib.stretto_version().decode()
    if found != _VERSION:
        raise StrettoError(f"{lib._name} has version {found}, wanted {_VERSION}")
    wanted = settings.get("STRETTO_CPU")
    if wanted and lib.stretto_set_isa(wanted.encode()) < 0:
        raise StrettoError(f"STRETTO_CPU: {lib.stretto_error().decode()}")
    return lib


def _find() -> Path:
    named = settings.get("STRETTO_LIBRARY")
    if named:
        return Path(named).resolve()
    suffix = "dylib" if platform.system() == "Darwin" else "so"
    package = Path(__file__).resolve().parent.parent
    places = [package / "lib" / f"libstretto.{suffix}", package.parent / "build" / f"libstretto.{suffix}"]
    for place in places:
        if place.exists():
            return place
    raise StrettoError(f"no libstretto.{suffix} in this installation (built without a compiler?)")
