"""Clock: which seed and epoch the next pass over a loader has.

The seed is one draw from the loader's generator (or torch's default one) at the first pass; later passes count epochs
under that seed, so that they can be prepared before they are asked for. A generator that was seeded anew, or set back
to where it was at that draw, starts a new count: torch.manual_seed(0) before a pass gives the same batches every time.
"""

import torch
from torch import Tensor


class Clock:
    def __init__(self) -> None:
        self.seed: int | None = None
        self.epoch = 0
        self._initial: int | None = None
        self._state: Tensor | None = None

    def tick(self, generator: torch.Generator | None) -> tuple[int, int]:
        """(seed, epoch) of the pass that begins now."""
        source = torch.default_generator if generator is None else generator
        if self.seed is None or self._initial != source.initial_seed() or self._rewound(source):
            self._initial, self._state = source.initial_seed(), source.get_state()
            self.seed = int(torch.empty((), dtype=torch.int64, device=source.device).random_(generator=generator))
            self.epoch = 0
        now = self.seed, self.epoch
        self.epoch += 1
        return now

    def _rewound(self, source: torch.Generator) -> bool:
        return self._state is not None and torch.equal(self._state, source.get_state())

    def state_dict(self) -> dict[str, int | None]:
        return {"seed": self.seed, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int | None], generator: torch.Generator | None) -> None:
        """Go on where another run stopped: the next pass has state["epoch"]."""
        source = torch.default_generator if generator is None else generator
        self.seed, self.epoch = state["seed"], int(state["epoch"] or 0)
        self._initial, self._state = source.initial_seed(), None


def mixed(seed: int, epoch: int, salt: int = 0) -> int:
    """A seed for torch's generators out of several numbers (SplitMix64), below 2**63."""
    mask = (1 << 64) - 1
    x = seed & mask
    for value in (epoch, salt):
        x = (x + 0x9E3779B97F4A7C15 * (value + 1)) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        x ^= x >> 31
    return x >> 1
