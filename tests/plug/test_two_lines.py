"""examples/two_lines.py: stock and accelerated side by side, with times, memory, the losses and a report."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_lines.py"


def test_it_compares_and_tells():
    variables = {**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1])}
    command = [sys.executable, str(EXAMPLE), "er:400:3000"]
    found = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=300, check=True).stdout
    rows = re.findall(r"^(stock PyG|stretto) +\d+ ms a step +\d+ MiB at its peak +loss (\d\.\d+)$", found, re.M)
    assert [name for name, _ in rows] == ["stock PyG", "stretto"]
    assert abs(float(rows[0][1]) - float(rows[1][1])) < 1e-3
    assert "times as fast" in found
    assert "2 of 2 layers ran fast" in found


def test_it_is_two_lines():
    marked = [line for line in EXAMPLE.read_text().splitlines() if re.search(r"# line (one|two)$", line)]
    assert [line.split("  #")[0].strip() for line in marked] == ["import stretto", "stretto.accelerate(model)"]
