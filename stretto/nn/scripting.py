"""TorchScript compiles an accelerated layer as the stock one: behind our forward it reads stock's (base.in_place_of).

A forward with overloads (TransformerConv, whose result depends on return_attention_weights) it also looks for in the
source of the layer's class. Ours has none, so stock's is handed in. A stock copy of the layer, which torch would take
from __prepare_scriptable__, is no way: torch puts it into the user's model, which would then run as stock.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import _jit_internal

from stretto.nn.classes import stock_of


def show_overloads() -> None:
    """Have torch.jit.script look for the overloads of an accelerated class in its stock class; others as before."""
    known = _jit_internal._get_overloaded_methods
    if hasattr(known, "_stretto"):
        return

    @functools.wraps(known)
    def found(method: Any, mod_class: type) -> Any:
        return known(method, stock_of(mod_class) or mod_class)

    found._stretto = True  # type: ignore[attr-defined]
    _jit_internal._get_overloaded_methods = found
