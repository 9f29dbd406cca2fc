"""Random calls of the loader's, the stores' and the samplers' entries, with right and wrong arguments mixed.

    python -m tests.loader.random_calls SEED COUNT [FIRST [SECONDS]]

Every call is a function of (SEED, its number) alone, and its number is printed before it is made: the last line before
a crash is the call that crashed, and FIRST repeats from there. A call may be refused by StrettoError, or by code of PyG
or torch that was reached first; what is not refused must be right: its rows are the rows of the table, its edges edges
of the graph. A call that does not end ends the process, which says where every thread stands; no call is begun after
SECONDS. test_random_calls.py runs it in a process of its own.
"""

import faulthandler
import sys
import time
import traceback
from pathlib import Path

import torch

import stretto
from stretto.errors import StrettoError
from tests.loader.random_arguments import Calls
from tests.loader.random_loaders import clusters, hetero, loader, sparse
from tests.loader.random_samplers import native, walks
from tests.loader.random_stores import store

ENTRIES = (native, native, loader, loader, hetero, sparse, store, walks, clusters)
CALL_LIMIT = 15.0  # seconds, of which a call takes some hundredths
OURS, TESTS = f"{Path(stretto.__file__).parent}/", f"{Path(__file__).parent}/"


def refused(error: BaseException) -> bool:
    """Whether it was refused as it should be: by us in words, or by PyG or torch before it came to us."""
    if isinstance(error, StrettoError):
        return True
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, (AssertionError, MemoryError)):
        return "torch_geometric" in files[-1]
    innermost = next((f for f in reversed(files) if f.startswith((OURS, TESTS)) or "torch_geometric" in f), "")
    return not innermost.startswith(OURS)


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main(seed: int, count: int, first: int = 0, seconds: float = float("inf")) -> int:
    wrong = 0
    end = time.monotonic() + seconds
    for number in range(first, first + count):
        if time.monotonic() > end:
            break
        calls = Calls(seed, number)
        entry = calls.choose.choice(ENTRIES)
        _say(f"{seed} {number} {entry.__name__} ")
        faulthandler.dump_traceback_later(CALL_LIMIT, exit=True)
        try:
            torch.manual_seed(number)
            entry(calls)
            outcome = "done"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}".splitlines()[0]
            if not refused(error):
                wrong += 1
                traceback.print_exc(file=sys.stdout)
                outcome = f"WRONG {outcome}"
        faulthandler.cancel_dump_traceback_later()
        _say(f"{'; '.join(calls.said)} -> {outcome}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*(int(argument) for argument in sys.argv[1:])))
