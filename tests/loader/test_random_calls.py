"""Some hundreds of random calls (random_calls.py) in processes of their own: a crash is a failed test."""

import subprocess
import sys

import pytest

COUNT, PARTS = 400, 2


@pytest.mark.parametrize("part", range(PARTS))
def test_random_calls_are_refused_or_right(part):
    size = COUNT // PARTS
    command = [sys.executable, "-W", "ignore", "-m", "tests.loader.random_calls", "0", str(size), str(part * size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"the last calls of {' '.join(command)}:\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}"
    outcomes = [line for line in done.stdout.splitlines() if "->" in line]
    assert len(outcomes) >= size
    assert sum(line.endswith("-> done") for line in outcomes) > size / 4  # most of what is random is right
