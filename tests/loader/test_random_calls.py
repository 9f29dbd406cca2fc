"""Some hundreds of random calls (random_calls.py) in processes of their own: who crashes or never ends has failed."""

import subprocess
import sys

import pytest

from stretto.errors import StrettoError
from tests.loader import random_calls

COUNT, PARTS = 400, 2
SECONDS = 10  # for a part; a slow machine makes fewer calls
LEAST = 20  # calls that any machine makes in that time
OURS, TESTS = "/a/stretto/stretto/", "/a/stretto/tests/loader/"


@pytest.mark.parametrize("part", range(PARTS))
def test_random_calls_are_refused_or_right(part):
    size = COUNT // PARTS
    numbers = (str(number) for number in (0, size, part * size, SECONDS))
    command = [sys.executable, "-W", "ignore", "-m", "tests.loader.random_calls", *numbers]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"the last calls of {' '.join(command)}:\n{done.stdout[-3000:]}\n{done.stderr[-4000:]}"
    outcomes = [line for line in done.stdout.splitlines() if "->" in line]
    assert len(outcomes) >= LEAST
    assert sum(line.endswith("-> done") for line in outcomes) > len(outcomes) / 4  # most of what is random is right


@pytest.mark.parametrize(
    ("error", "folder", "is_refused"),
    [
        (StrettoError("no"), OURS, True),
        (ValueError("no"), OURS, False),
        (AssertionError("no"), OURS, False),
        (ValueError("no"), TESTS, True),  # torch's, raised where these calls use what was spoilt
        (AssertionError("no"), TESTS, False),
    ],
)
def test_who_refuses_is_told_by_the_folder(error, folder, is_refused, monkeypatch):
    """Wherever the checkout is, also in a folder of our name."""
    monkeypatch.setattr(random_calls, "OURS", OURS)
    monkeypatch.setattr(random_calls, "TESTS", TESTS)
    names: dict = {}
    exec(compile("def fail(error):\n    raise error", f"{folder}/a_file.py", "exec"), names)
    with pytest.raises(type(error)) as caught:
        names["fail"](error)
    assert random_calls.refused(caught.value) == is_refused


def test_a_call_that_does_not_end_is_told_with_its_stack():
    code = (
        "import time; from tests.loader import random_calls as r; r.CALL_LIMIT = 0.5\n"
        "def never_ending(calls): time.sleep(100)\n"
        "r.ENTRIES = (never_ending,); r.main(0, 1)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert done.stdout == "0 0 never_ending "
    assert "in never_ending" in done.stderr
