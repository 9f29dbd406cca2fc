"""Which variants of each kernel exist, and when each is legal. The first one is the documented default.

All variants of spmm on the CPU but "torch" add in the same order: their results are bitwise the same. On CUDA a
variant is a shape of tile, and the order of the sums follows it: a choice once made gives the same bits every time.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Variant:
    """A way to run a kernel: who runs it, and the options it is given."""

    name: str
    backend: str = "native"
    options: dict[str, int] = field(default_factory=dict, hash=False)
    least_width: int = 1  # legal from this many columns on
    most_width: int = 1 << 30  # and up to this many
    plain_only: bool = False  # legal only for an unscaled or weighted sum in fp32 or fp64


VARIANTS: dict[str, dict[str, tuple[Variant, ...]]] = {
    "spmm": {
        "cpu": (
            # A narrow row is soon done with: what is asked for has to be further ahead.
            Variant("row_ahead24", options={"tile": 0, "prefetch": 24}, most_width=64),
            Variant("row_ahead8", options={"tile": 0, "prefetch": 8}),
            Variant("row_ahead16", options={"tile": 0, "prefetch": 16}),
            Variant("row_plain", options={"tile": 0, "prefetch": 0}),
            Variant("tile128_ahead8", options={"tile": 128, "prefetch": 8}, least_width=256),
            Variant("tile64_ahead8", options={"tile": 64, "prefetch": 8}, least_width=128),
            Variant("torch", backend="torch", plain_only=True),
        ),
        "cuda": (
            Variant("columns128"),
            Variant("columns64", options={"block_k": 64}, least_width=128),
            Variant("columns256", options={"block_k": 256, "block_e": 2}, least_width=256),
            Variant("columns32", options={"block_k": 32}, least_width=64),
            Variant("cusparse", backend="torch", plain_only=True),
        ),
    },
    # What backward of attention reads of forward: two numbers a node, or besides them a score per edge and head.
    "attention": {"cpu": (Variant("scores_again"), Variant("scores_kept"))},
    "product": {
        "cpu": (Variant("torch", backend="torch"), Variant("tiles")),
        "cuda": (
            Variant("torch", backend="torch"),
            Variant("rows128x64", options={"block_m": 128, "block_n": 64, "warps": 8}),
        ),
    },
}


def legal(op: str, device: str, *, width: int, plain: bool) -> tuple[Variant, ...]:
    """The variants that may run; the first is the default. Nothing to choose: empty."""
    return tuple(
        v
        for v in VARIANTS.get(op, {}).get(device, ())
        if v.least_width <= width <= v.most_width and (plain or not v.plain_only)
    )
