"""What PyG's convs cost as they are written, by hand: flops of one forward call, independent of any trace.

Sizes: n nodes, m edges as given, a without self-loops, e = a + n with one loop per node; k in, c out, H heads, K hops.
Counting as in costs.py: products 2 n k c, one flop per element of everything else. Tests hold these against the counts.
"""

from __future__ import annotations

import sympy

n, m, a, e, k, c, H, K = sympy.symbols("n m a e k c H K", positive=True, integer=True)

# gcn_norm: which edges are loops (with loops added), degrees, their power and its infinities, two factors per edge.
NORM = m + 3 * e + 3 * n
NORM_WITHOUT_LOOPS = 3 * m + 3 * n

FORWARD = {
    # A (X W): the product first, always; weight and sum at the width of the output.
    "GCNConv": NORM + 2 * n * k * c + 2 * e * c + n * c,
    # mean: sum and count per edge, division; two products, one with bias.
    "SAGEConv": m * k + m + n + n * k + 4 * n * k * c + 2 * n * c,
    # sum, (1 + eps) x added, an MLP k -> c -> c.
    "GINConv": m * k + 1 + 2 * n * k + 2 * n * k * c + 2 * n * c**2 + 3 * n * c,
    # W per head, two scores per node; per edge and head seven steps to the softmax, then weight and sum.
    "GATConv": m + 2 * n * k * H * c + 5 * n * H * c + n * H + n * c + e * (7 * H + 2 * H * c),
    # [x_i, x_j - x_i] through an MLP 2k -> c -> c on every edge, then the maximum.
    "EdgeConv": m * (k + 4 * k * c + 2 * c**2 + 4 * c),
    "SGConv": NORM + K * 2 * e * k + 2 * n * k * c + n * c,
    # K products, K - 1 hops; the recurrence from the third term on.
    "ChebConv": m + 4 * a + 6 * e + 4 * n + 1 + (K - 1) * 2 * e * k + (K - 2) * 2 * n * k + K * (2 * n * k * c + n * c),
    "APPNP": NORM + K * (2 * e * c + 3 * n * c),
    "TAGConv": NORM_WITHOUT_LOOPS + K * 2 * m * k + (K + 1) * (2 * n * k * c + n * c),
}
