"""The rows in benchmarks/results are whole, and the tables of the docs are what they say."""

import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.suites import results

ROOT = Path(__file__).parents[1]
FILES = sorted(tables.RESULTS.glob("*"))
LIMIT = 1_000_000  # bytes of all files together
pytestmark = pytest.mark.skipif(not FILES, reason="no results beside this installation")


def test_results_are_one_small_csv_a_suite():
    assert FILES
    assert {file.suffix for file in FILES} == {".csv"}
    assert sum(file.stat().st_size for file in FILES) <= LIMIT
    assert {table.suite for table in tables.TABLES.values()} <= {file.stem for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_row_says_what_and_where(file):
    rows = results.load(file)
    columns = list(rows[0])
    first = columns.index(results.COMMON[0])
    assert columns[0] == "suite"
    assert 1 < first < columns.index("machine")
    assert tuple(columns[first : first + len(results.COMMON)]) == results.COMMON
    for row in rows:
        assert row["suite"] == file.stem
        assert all(row[column] for column in (*results.PLACE, "unit", "quantiles")), row
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"]), row
        low, middle, high = (results.number(row, column) for column in ("ours_low", "ours", "ours_high"))
        assert middle is None or (low or middle) <= middle <= (high or middle), row
    assert len({results.key(row) for row in rows}) == len(rows)


@pytest.mark.parametrize("page", [*tables.pages()], ids=lambda page: page.name)
def test_pages_say_what_the_rows_say(page):
    text = page.read_text()
    assert tables.rewritten(text) == text, f"{page.name} differs from benchmarks/results; run: make tables"


def test_every_table_has_its_place():
    asked = {words.split()[0] for page in tables.pages() for _, words, _ in tables.PLACES.findall(page.read_text())}
    assert asked == set(tables.TABLES)
    for page in tables.pages():
        assert page.read_text().count("<!-- table:") == len(tables.PLACES.findall(page.read_text()))


def test_a_page_is_rewritten_between_its_marks_alone():
    text = "before\n\n<!-- table: gpu-ceilings kind=ceiling -->\nold\n<!-- end -->\n\nafter\n"
    new = tables.rewritten(text)
    assert new.startswith("before\n\n<!-- table: gpu-ceilings kind=ceiling -->\n| ceiling | rate |\n")
    assert new.endswith("<!-- end -->\n\nafter\n")
    assert "old" not in new
    assert tables.rewritten(new) == new
    with pytest.raises(ValueError, match=r"no row of gpu\.csv"):
        tables.render("gpu-ceilings kind=nothing")


def test_result_files_that_are_named_are_there():
    files = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True)
    if files.returncode:
        pytest.skip("no checkout")
    known = {file.name for file in FILES}
    for name in files.stdout.split():
        path = ROOT / name
        if path.suffix not in (".py", ".md", ".h", ".cpp", ".toml") or not path.exists():
            continue
        named = set(re.findall(r"benchmarks/results/([\w.-]+\w)", path.read_text()))
        assert named <= known, (name, named - known)
