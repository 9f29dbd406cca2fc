"""What is written down and said of a layer that runs as stock, and strict=True, by which it may not."""

from __future__ import annotations

import logging

import torch

from stretto.errors import fail
from stretto.layers.base import UNKNOWN, Record, known_record, record_of
from stretto.layers.layer import Conv

logger = logging.getLogger("stretto")
_said: set[str] = set()


def strict_of(module: torch.nn.Module) -> str:
    """The layer's name in its model where a call that would run as stock raises, else ""."""
    record = known_record(module)
    return "" if record is None else record.strict


def set_strict(module: torch.nn.Module, name: str) -> None:
    """From now on a call that would run as stock raises, with this name; "": it does not."""
    if strict_of(module) != name:
        record_of(module).strict = name


def refuse(conv: Conv, record: Record, reason: str) -> None:
    """Raise where accelerate(strict=True) was promised that this layer would not run as stock."""
    if is_lazy(conv):
        return  # its first call gives a lazy layer its shape, and only stock's can
    fail(
        f"layer {record.strict!r} ({type(conv).__name__}): strict=True, but this call would run as stock: {reason}. "
        "accelerate(model) without strict allows it from now on"
    )


def is_lazy(conv: Conv) -> bool:
    """Whether a layer has yet to learn its channels from its first input."""
    return any(isinstance(p, torch.nn.parameter.UninitializedParameter) for p in conv.parameters())


def tell(conv: Conv, record: Record, reason: str) -> None:
    """Write down that a layer runs as stock, and say so once for each reason of its class."""
    record.path, record.reason, record.way = "stock", reason, UNKNOWN
    if not said(conv, reason):
        logger.info("stretto: %s runs as stock: %s", type(conv).__name__, reason)


def said(conv: Conv, reason: str) -> bool:
    """Whether this reason of such a layer was told before; from now on it was."""
    text = f"{type(conv).__name__}: {reason}"
    before = text in _said
    _said.add(text)
    return before


def note_stock(conv: Conv, reason: str) -> None:
    """Write down that a call runs as stock, or raise where it may not."""
    record = record_of(conv)
    record.calls += 1
    tell(conv, record, reason)
    if record.strict:
        refuse(conv, record, reason)
