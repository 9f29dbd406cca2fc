"""Which variant of a kernel runs: the machine, the variants there are, what was measured and where it is kept."""

from stretto.tune.pick import Picker, picker
from stretto.tune.variants import VARIANTS, Variant

__all__ = ["VARIANTS", "Picker", "Variant", "picker"]
