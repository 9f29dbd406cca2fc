"""What the attention kernels take.

kernel           arguments                                            result
attention        csr, Attention                                       out [n, h, f], out_attr, alpha [E, h], stats
attention_grad   csr, transposed csr, Attention, results, gradients   one gradient per tensor of the Attention
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# Codes of csrc/abi.h.
FORMS = {"given": 0, "weight": 1, "gat": 2, "gatv2": 3, "dot": 4}
# The tensors of an Attention, in the order in which gradients come back.
TENSORS = ("v", "left", "right", "att", "edge", "attr", "query")


@dataclass
class Attention:
    """Softmax over each row's edges of a score, then the weighted sum of v [m, h, f] or [m, 1, f] (None: v is right).

    given   edge [E, h]
    weight  edge [E, h], taken as the weights themselves: no softmax
    gat     leaky_relu(left [n, h] + right [m, h] + edge [E, h])
    gatv2   att [h, k] . leaky_relu(left [n, h, k] + right [m, h, k] + edge [E, h, k])
    dot     scale * (left [n, h, k] . right [m, h or 1, k] + query [n, h, d] . attr [E, d]); attr is also averaged
    """

    form: str
    v: Tensor | None
    left: Tensor | None = None
    right: Tensor | None = None
    att: Tensor | None = None
    edge: Tensor | None = None
    attr: Tensor | None = None
    query: Tensor | None = None
    slope: float = 0.2
    scale: float = 1.0
    dropout: float = 0.0
    seed: int = 0
    dropped: bool = False  # whether alpha is returned after dropout
    seed_at: Tensor | None = None  # a device's own seed [1] int64, not mixed yet: `seed` is then unused
    scores: Tensor | None = None  # [E, h] room on the CPU: forward leaves every score there, backward reads it
    bias: Tensor | None = (
        None  # [h * f], added to the result, which is then [n, h * f]; only as wide as a backend takes
    )

    @property
    def values(self) -> Tensor:
        found = self.right if self.v is None else self.v
        assert found is not None
        return found

    @property
    def heads(self) -> int:
        for tensor in (self.left, self.edge):
            if tensor is not None:
                return tensor.size(1)
        return self.values.size(1)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, name) for name in TENSORS)
