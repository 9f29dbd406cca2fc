"""Would more hardware help? Work, depth, memory and communication of a step: `stretto.analyze(model, data)`.

What it gains: whether a step fits, what would make it faster, and what P workers would take, before anything is run;
step times came out within 2x in 48 of 48 cells, memory within 15 % in 96 of 96 (docs/why_slow.md). The package is also
its main function: stretto.analyze is callable whether or not one of its modules was imported first.
"""

import sys
from types import ModuleType
from typing import Any

from stretto.analyze.analysis import analyze
from stretto.analyze.report import Report
from stretto.machine.file import Machine
from stretto.observe.workload import Workload

__all__ = ["Machine", "Report", "Workload", "analyze"]


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Report:
        return analyze(*args, **kwargs)


_Callable.__call__.__doc__ = analyze.__doc__
sys.modules[__name__].__class__ = _Callable
