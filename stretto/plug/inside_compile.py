"""Inside torch.compile a layer is stock's code, which torch compiles as a whole: its record says so.

The note is taken while torch traces the layer, by torch's own hook for that (comptime): the compiled code stays as it
is, and no graph is broken. A call of code that is already compiled leaves no note.
"""

from __future__ import annotations

from typing import Any

import torch

from stretto.layers.base import UNKNOWN, record_of

REASON = "inside torch.compile: stock's code is compiled"


def note(self: Any) -> None:
    """Write down that a layer is being compiled. Called by code that torch.compile traces."""
    from torch._dynamo.comptime import comptime  # loading it takes long; here it is loaded

    comptime(_note)


def _note(context: Any) -> None:
    """Runs at compile time. context: of the call of note() above."""
    tracked = context.get_local("self")._i_will_not_complain_if_bc_breaks_VariableTracker()
    module = getattr(tracked, "value", None)
    if isinstance(module, torch.nn.Module):
        record = record_of(module)
        record.path, record.reason, record.way = "compiled", REASON, UNKNOWN
