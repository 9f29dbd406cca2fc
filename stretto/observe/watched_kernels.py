"""Our own kernels under watch: a dispatch mode does not see them, for no dispatcher calls them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from stretto import kernels
from stretto.kernels import cpu, cpu_attention, cpu_chain, cpu_dense, cpu_edge, cpu_statistics, tall
from stretto.observe import kernel_costs

TRITON = "stretto.kernels.triton"
Call = Callable[[Any, str, Any, Any, Any], Any]  # (kernel, name, args, kwargs, its schema: none)


def _holders() -> list[tuple[Any, tuple[str, ...]]]:
    """Backends, modules whose functions ops call directly, and which of their functions are kernels.

    The reference is plain torch and seen op by op.
    """
    names = tuple(kernel_costs.KERNELS)
    native = (kernels.NATIVE, cpu, cpu_attention, cpu_chain, cpu_dense, cpu_edge, cpu_statistics, tall)
    result: list[tuple[Any, tuple[str, ...]]] = [(holder, names) for holder in native]
    if TRITON in sys.modules:
        triton, names = sys.modules[TRITON].BACKEND, (*names, *kernel_costs.ON_A_CARD)
        result += [(triton, names), (triton.attention_layer, names)]
    return result


@contextmanager
def watched_kernels(call: Call) -> Iterator[None]:
    """Calls of our kernels are handed to `call` until the end of the block.

    The functions are replaced where they are looked up: ops choose kernels by the backend.
    """
    with ExitStack() as stack:
        if TRITON in sys.modules:  # a tape would launch them unseen
            tape = sys.modules[TRITON].BACKEND.tape
            stack.callback(setattr, tape, "playing", tape.playing)
            tape.playing = False
        for holder, names in _holders():
            for name in names:
                plain = vars(holder).get(name)
                if plain is not None:
                    stack.callback(setattr, holder, name, plain)
                    setattr(holder, name, _watched(call, name, plain))
        yield


def _watched(call: Call, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: call(plain, f"stretto::{name}", args, kwargs, None)
