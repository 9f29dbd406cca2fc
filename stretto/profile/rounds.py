"""Where a step ends of a script with several optimizers: a generator's and a discriminator's, or two of one model.

One of them closes a round, and a round is a step. A script that steps its discriminator five times and its generator
once has steps of six; one that trains a model to the end and then another has steps of the second, from there on.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

Signature = tuple[Any, ...]  # class and shapes of the parameters of an optimizer
Makeup = tuple[int, ...]  # whose steps a round has, in order


@dataclass
class _Kind:
    """An optimizer, or several that took its place one after the other, as in folds of a cross-validation."""

    signature: Signature
    now: weakref.ref[Any] | None = None
    before: list[weakref.ref[Any]] = field(default_factory=list)

    def replaced(self, optimizer: Any) -> bool:
        """Whether the optimizer was of this kind before another took its place."""
        return any(known() is optimizer for known in self.before)


def signature(optimizer: Any) -> Signature:
    """What an optimizer has in common with that of another fold, or of another run of the script."""
    shapes = tuple(tuple(p.shape) for group in optimizer.param_groups for p in group["params"])
    return type(optimizer).__name__, shapes


class Rounds:
    """Told of every step of an optimizer. known: kinds of a run before, to which nothing is added then."""

    def __init__(self, known: tuple[Signature, ...] = ()) -> None:
        self._kinds = [_Kind(one) for one in known]
        self._fixed = bool(known)
        self._taken: list[int] = []
        self.makeup: Makeup = ()  # of the last round

    @property
    def kinds(self) -> tuple[Signature, ...]:
        """The kinds that have stepped; the last one closes a round."""
        return tuple(kind.signature for kind in self._kinds)

    def stepped(self, optimizer: Any) -> str:
        """Say "ends" if a round ends here, "anew" if rounds are other ones from here on, else ""."""
        known = len(self._kinds)
        place = self._place(optimizer)
        if place is None:
            return ""
        if 0 < known < len(self._kinds):
            self._taken.clear()
            return "anew"
        self._taken.append(place)
        if place != len(self._kinds) - 1:
            return ""
        self.makeup = tuple(self._taken)
        self._taken.clear()
        return "ends"

    def _place(self, optimizer: Any) -> int | None:
        """The kind of an optimizer by its place; one more kind where it is new. None: it is left out."""
        for place, kind in enumerate(self._kinds):
            if kind.now is not None and kind.now() is optimizer:
                return place
        result = self._of(optimizer)
        if result is None:
            return None
        result.now = weakref.ref(optimizer)
        return next(place for place, one in enumerate(self._kinds) if one is result)

    def _of(self, optimizer: Any) -> _Kind | None:
        """The kind of an optimizer that is not the last one of its kind that stepped."""
        mine = signature(optimizer)
        same = [kind for kind in self._kinds if kind.signature == mine]
        waiting = next((kind for kind in same if kind.now is None), None)
        if waiting is not None:
            return waiting
        again = any(kind.replaced(optimizer) for kind in same)  # it took turns, nothing took its place
        if same and (self._fixed or not again):
            if same[-1].now is not None:
                same[-1].before.append(same[-1].now)
            return same[-1]
        if self._fixed:  # another model than last time is for others to tell
            return self._kinds[-1] if all(kind.now is None for kind in self._kinds) else None
        self._kinds.append(_Kind(mine))
        return self._kinds[-1]
