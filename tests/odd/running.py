"""Cases in a process of their own: one line before each, one after; a crash is a case without its second line."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
MOST_CRASHES = 20
Case = tuple[str, Callable[[], str]]  # what it is called; what is wrong, or nothing


def main(table: Callable[[], list[Case]], drawn: Callable[[int, int], list[Case]], words: list[str]) -> None:
    """What the process does: FIRST [SEED COUNT] on its command line; seed 0: every COUNT-th case of the table."""
    first, *rest = map(int, words)
    torch.set_num_threads(1)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    cases = drawn(*rest) if rest and rest[0] else table()[:: rest[1] if rest else 1]
    for number, (name, check) in enumerate(cases[first:], first):
        out.write(f"{number} {name}\n")
        try:
            told = check()
        except Exception:
            told = "the test itself: " + traceback.format_exc()
        out.write("= " + told.replace("\n", " | ") + "\n")
    out.write("end\n")


def failures(module: str, drawn: Sequence[int] = ()) -> tuple[list[str], int]:
    """Runs `python -m module` until all cases are through; what went wrong, crashes included, and how many ran."""
    found, first, crashes = [], 0, 0
    while True:
        command = [sys.executable, "-m", module, str(first), *map(str, drawn)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
        lines = done.stdout.splitlines()
        name = ""
        for line in lines:
            if line.startswith("= "):
                if line != "= ":
                    found.append(f"{name}: {line[2:]}")
            elif line != "end":
                number, name = line.split(" ", 1)
                first = int(number) + 1
        if lines and lines[-1] == "end":
            return found, first
        found.append(f"{name}: the process ended with {done.returncode}: {done.stderr[-600:]}")
        crashes += 1
        if crashes > MOST_CRASHES or not lines:
            return found, first
