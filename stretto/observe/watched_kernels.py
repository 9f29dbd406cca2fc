"""Our own kernels under watch: a dispatch mode does not see them, for no dispatcher calls them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from stretto import kernels
from stretto.kernels import cpu_attention, cpu_chain, cpu_dense, cpu_edge, cpu_statistics, tall
from stretto.observe import kernel_costs

Call = Callable[[Any, str, Any, Any, Any], Any]  # (kernel, name, args, kwargs, its schema: none)


def _kernel_modules() -> list[tuple[ModuleType, tuple[str, ...]]]:
    """Every module whose functions are kernels, and their names; the reference is plain torch and seen op by op."""
    native = (kernels.cpu, cpu_attention, cpu_chain, cpu_dense, cpu_edge, cpu_statistics, tall)
    result: list[tuple[ModuleType, tuple[str, ...]]] = [(module, tuple(kernel_costs.KERNELS)) for module in native]
    triton: Any = sys.modules.get("stretto.kernels.triton")
    if triton is not None:
        names = (*kernel_costs.KERNELS, *kernel_costs.ON_A_CARD)
        result += [(triton, names), (triton.attention_layer, names)]
    return result


@contextmanager
def watched_kernels(call: Call) -> Iterator[None]:
    """Calls of our kernels are handed to `call` until the end of the block.

    The functions are replaced inside their modules: ops choose kernels by the identity of the module.
    """
    with ExitStack() as stack:
        tape: Any = sys.modules.get("stretto.kernels.triton.tape")
        if tape is not None:  # a tape would launch them unseen
            stack.callback(setattr, tape, "playing", tape.playing)
            tape.playing = False
        for module, names in _kernel_modules():
            for name in names:
                plain = getattr(module, name, None)
                if plain is not None:
                    stack.callback(setattr, module, name, plain)
                    setattr(module, name, _watched(call, name, plain))
        yield


def _watched(call: Call, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: call(plain, f"stretto::{name}", args, kwargs, None)
