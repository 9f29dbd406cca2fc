"""Which variant of a kernel runs: the variants there are, and the choice among them inside the user's own calls."""

from stretto.tune.pick import Picker, picker
from stretto.tune.variants import VARIANTS, Variant

__all__ = ["VARIANTS", "Picker", "Variant", "picker"]
