"""The page that names a test for every acceptance item names tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "acceptance_of_analysis.md"


def test_every_item_names_tests_that_exist():
    if not PAGE.exists():
        pytest.skip("no docs beside this installation")
    rows = [line for line in PAGE.read_text().splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row.split("|")[1]) for row in rows] == [*range(1, 17), 19, 20, 21]
    paths = [*(ROOT / "tests").rglob("test_*.py")]
    defined = {path.name: set() for path in paths}
    for path in paths:
        defined[path.name] |= set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))
    for row in rows:
        words = re.findall(r"`(test_\w+(?:\.py|\*)?)", row)
        assert words[0].endswith(".py"), row
        for word in words:
            if word.endswith(".py"):
                assert word in defined, word
                file = word  # of the tests that follow
            elif word.endswith("*"):
                assert any(name.startswith(word[:-1]) for name in defined[file]), (file, word)
            else:
                assert word in defined[file], (file, word)
