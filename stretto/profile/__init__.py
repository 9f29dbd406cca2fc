"""Why is my model slow? Every op of a step, timed, explained and improved: `stretto.profile(model, data)`.

The package is also its main function: stretto.profile is callable whether or not one of its modules was imported first.
"""

import sys
from types import ModuleType
from typing import Any

from stretto.profile.profiling import Group, Profile, profile

__all__ = ["Group", "Profile", "profile"]


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Profile:
        return profile(*args, **kwargs)


_Callable.__call__.__doc__ = profile.__doc__
sys.modules[__name__].__class__ = _Callable
