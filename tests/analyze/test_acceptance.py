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
    files = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    defined = {name for text in files.values() for name in re.findall(r"def (test_\w+)", text)}
    for row in rows:
        words = re.findall(r"`(test_\w+(?:\.py|\*)?)", row)
        assert words, row
        for word in words:
            if word.endswith(".py"):
                assert word in files, word
            elif word.endswith("*"):
                assert any(name.startswith(word[:-1]) for name in defined), word
            else:
                assert word in defined, word
