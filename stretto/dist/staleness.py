"""How old the rows and gradients that a layer reads may be: the parameter vector of Besta and Hoefler's Eq. 3 and 5.

    h_i(t, l) = phi(h_i(own), sum over local j of psi(h_i(own), h_j(local)),
                              sum over remote j of psi(h_i(own), h_j(remote)))
    grad h_j(t, l) = sum over local i of grad h_i(local_gradient) + sum over remote i of grad h_i(remote_gradient)

An Age counts steps back (T) and layers back (L; 1 is the layer just before, for gradients the layer just after). The
six numbers of own, local and remote and the four of the gradients are upper bounds. All T = 0 and all L = 1 is the
synchronous step (Eq. 2 and 4): all ranks together compute what one process would.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from stretto.errors import expect


@dataclass(frozen=True)
class Age:
    """steps: T, how many steps back. layers: L, how many layers back (1: the neighbouring one)."""

    steps: int = 0
    layers: int = 1

    def __post_init__(self) -> None:
        expect(self.steps >= 0, f"Age: 'steps' is {self.steps}, wanted 0 or more")
        expect(self.layers >= 1, f"Age: 'layers' is {self.layers}, wanted 1 or more")

    def within(self, bound: Age) -> bool:
        """Whether neither count exceeds the bound's."""
        return self.steps <= bound.steps and self.layers <= bound.layers


FRESH = Age()


@dataclass(frozen=True)
class Staleness:
    """Bounds on the age of what a layer reads. The default is synchronous.

    Rows are taken as old as allowed, as soon as rows that old exist; so runs repeat bit for bit. newest=True takes the
    newest remote rows that have arrived instead, and waits only where they would be too old.
    A layer count above 1 holds where that layer exists and its rows are as wide; elsewhere the nearest one is read.
    A gradient belongs to the rows that a synchronous step would have read; that of `own` is always this step's.
    """

    own: Age = FRESH  # T_phi, L_phi
    local: Age = FRESH  # T^L, L^L
    remote: Age = FRESH  # T^R, L^R
    local_gradient: Age = FRESH
    remote_gradient: Age = FRESH
    newest: bool = False

    @staticmethod
    def halo(steps: int) -> Staleness:
        """Remote rows and gradients up to `steps` steps old, all else fresh: 0 is synchronous, 1 is PipeGCN."""
        return Staleness(remote=Age(steps), remote_gradient=Age(steps))

    @property
    def bounds(self) -> dict[str, Age]:
        """Slot -> bound."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "newest"}

    @property
    def memory_steps(self) -> int:
        """How many steps back anything is read."""
        return max(bound.steps for bound in self.bounds.values())


@dataclass(frozen=True)
class Reading:
    """One use of rows or gradients, and how old they were."""

    step: int
    layer: int  # from 1
    slot: str  # a field of Staleness
    age: Age
