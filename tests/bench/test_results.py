"""Result files: one row a case, the latest; what is common to all suites stands where a reader expects it."""

import subprocess

import pytest

from benchmarks.suites import results
from stretto.errors import StrettoError
from stretto.machine.timing import Timing


def row(width: int, ours: float, **more):
    measured = {"stretto": (ours, ours / 2, ours * 2), "stock": (6.0, 5.0, 7.0), "better": (4.0, 3.0, 5.0)}
    case = {"op": "spmm", "width": width}
    return results.row("ops", case, measured, stock="stock", threads=3, command="do it", **more)


def test_a_row_says_who_took_how_long_and_where():
    found = row(16, 2.0, more={"met": True, "nothing": None})
    assert list(found)[: 3 + len(results.COMMON)] == ["suite", "op", "width", *results.COMMON]
    assert [found[c] for c in ("ours", "ours_low", "ours_high")] == ["2", "1", "4"]
    assert [found[c] for c in ("stock", "best", "best_name", "ratio", "best_ratio")] == ["6", "4", "better", "3", "2"]
    assert (found["threads"], found["command"], found["met"], found["nothing"]) == ("3", "do it", "yes", "")
    assert all(found[column] for column in results.PLACE)
    assert results.case_of(found) == {"op": "spmm", "width": "16"}
    only = row(16, 2.0, rivals=["stock"])
    assert only["best_name"] == "stock"


def test_figures_are_medians_between_quantiles():
    timing = Timing((5e-3, 1e-3, 2e-3, 3e-3, 4e-3, 6e-3))
    assert results.figure(timing) == pytest.approx((3.5, 2.0, 5.0))


def test_what_is_measured_again_replaces_its_row(tmp_path):
    path = tmp_path / "ops.csv"
    results.save(path, [row(16, 2.0), row(32, 2.0)])
    results.save(path, [row(16, 1.0, more={"new": 7})])
    assert [(known["width"], known["ours"], known["new"]) for known in results.load(path)] == [
        ("16", "1", "7"),
        ("32", "2", ""),
    ]
    elsewhere = row(16, 9.0) | {"machine": "another"}
    results.save(path, [elsewhere])
    assert [known["ours"] for known in results.load(path)] == ["1", "2", "9"]


def test_what_was_not_measured_is_empty(tmp_path):
    measured = {"stretto": (1.0, 1.0, 1.0)}
    found = results.row("ops", {"op": "spmm"}, measured, stock="stock", command="do it", note="stock: no memory, none")
    results.save(tmp_path / "ops.csv", [found])
    (back,) = results.load(tmp_path / "ops.csv")
    assert back == found
    assert back["ratio"] == back["stock"] == back["best_name"] == ""
    assert results.number(back, "ratio") is None


def test_a_file_holds_one_suite(tmp_path):
    path = tmp_path / "ops.csv"
    results.save(path, [row(16, 2.0)])
    other = results.row("models", {"model": "gcn"}, {}, command="do it")
    with pytest.raises(StrettoError, match="rows of several kinds: models model; ops op width"):
        results.save(path, [other])
    assert len(results.load(path)) == 1
    results.save(None, [other])  # nowhere


def test_the_commit_is_that_of_the_checkout(tmp_path):
    root = results.Path(results.__file__).resolve().parents[2]
    results.commit.cache_clear()
    known = subprocess.run(["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    if known.returncode:
        assert results.commit() == results.UNKNOWN
    else:
        assert results.commit().removesuffix("+changes") == known.stdout.strip()


def test_without_a_checkout_the_commit_is_what_one_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "__file__", str(tmp_path / "stretto" / "bench" / "results.py"))
    for told, wanted in (("", results.UNKNOWN), ("abc1234", "abc1234")):
        monkeypatch.setenv("STRETTO_COMMIT", told)
        results.commit.cache_clear()
        assert results.commit() == wanted
    results.commit.cache_clear()
