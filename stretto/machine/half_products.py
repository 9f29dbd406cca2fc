"""Products of 16-bit numbers, timed in a process of their own: `python half_products.py THREADS`, a line for each type.

Where a virtual machine names matrix instructions that it does not let through, torch's bfloat16 product ends the
process (an illegal instruction). So ceilings.py has them tried by this file, which imports torch alone.
"""

import sys
import time

import torch

SIDE, TIMES = 512, 20


def rate(dtype: torch.dtype) -> float:
    """Flop/s of the fastest of some products."""
    a = torch.ones(SIDE, SIDE, dtype=dtype)
    out = torch.empty_like(a)
    least = float("inf")
    for _ in range(TIMES):
        start = time.perf_counter()
        torch.mm(a, a, out=out)
        least = min(least, time.perf_counter() - start)
    return 2.0 * SIDE**3 / least


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    for kind in (torch.float16, torch.bfloat16):
        sys.stdout.write(f"{str(kind).removeprefix('torch.')} {rate(kind)}\n")
        sys.stdout.flush()
