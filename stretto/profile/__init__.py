"""Why is my model slow? Every op of a step, timed, explained and improved: `stretto.profile(model, data)`.

What it gains: of a GraphSAGE on amazon-photo it found the three groups of ops that took 84 % of the time, and `apply`
made the step 18.8x as fast (docs/why_slow.md); a script of a user's own is profiled as it is. The package is also its
main function: stretto.profile is callable whether or not one of its modules was imported first.
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
