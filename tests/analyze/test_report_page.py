"""The HTML reports in a headless browser: they open without errors, sort, filter, fit a phone and turn dark."""

import re

import pytest
import torch

import stretto.analyze
import stretto.profile
from stretto import datasets
from stretto.analyze import Machine
from stretto.analyze.page import HOST, LIMIT, scaling
from stretto.observe.models import as_data, make
from stretto.page.charts import shortened
from stretto.page.frame import page, table
from stretto.page.svg import bars, fitting, lines, roofline
from stretto.page.text import short, with_unit
from stretto.profile import words
from tests.analyze.browser import opened

MACHINE = Machine()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Both reports, written once."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("pages")
    data = as_data(datasets.load_graph("er:200:800"), width=16)
    report = stretto.analyze(make("gat", 16, 8, 8), data, machine=MACHINE, procs=[1, 2, 4])
    report.validate(repeats=1, workers=0)
    report.to_html(folder / "analysis.html")
    profile = stretto.profile(make("gcn", 16, 8, 8), data, machine=MACHINE, repeats=1)
    profile.replay(repeats=2)
    profile.recommend(repeats=2)
    profile.advice[0]["saves_ms"] = max(1.0, profile.advice[0]["saves_ms"])  # whatever two turns say
    profile.apply(repeats=2)
    profile.to_html(folder / "profile.html")
    return folder


NAMES = ("analysis", "profile")


@pytest.mark.parametrize("name", NAMES)
def test_self_contained(pages, name):
    text = (pages / f"{name}.html").read_text()
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"<(link|img|iframe)|src=", text)
    assert text.count("<svg") == text.count("</svg>") >= 3
    assert "nan" not in re.sub(r"[a-z]*nan[a-z]+|[a-z]+nan[a-z]*", "", text.lower())


def test_the_analysis_shows_all_that_was_found(pages):
    text = (pages / "analysis.html").read_text()
    for title in (
        "Strategies that do not apply", "Work and depth by layer", "Graph", "Memory",
        "Sparse and dense work",
    ):  # fmt: skip
        assert f"<h2>{title}" in text, title
    for column in ("fits", "where", "W/D", "steps", "note"):
        assert re.search(rf"<th[^>]*>{column}</th>", text), column
    for said in (
        "best re-association",
        "attention needs its softmax",
        "reuse distance",
        "elsewhere",
        "inside the act",
    ):
        assert said in text, said


@pytest.fixture(scope="module", params=[(1200, 1600), (390, 844)], ids=["desktop", "phone"])
def browser(request):
    yield from opened(*request.param)


@pytest.mark.parametrize("name", NAMES)
def test_opens_without_errors(browser, pages, name):
    browser.open(pages / f"{name}.html")
    assert browser.errors() == []
    assert browser.js("return document.querySelectorAll('svg').length") >= 3


@pytest.mark.parametrize("name", NAMES)
def test_sorting(browser, pages, name):
    browser.open(pages / f"{name}.html")
    column = (
        "const t=document.getElementById('ops');"
        "const i=[...t.querySelectorAll('th')].findIndex(h=>h.textContent==='ms');"
    )
    read = column + "return [...t.tBodies[0].rows].map(r=>parseFloat(r.cells[i].dataset.value))"
    click = column + "t.querySelectorAll('th')[i].click();"
    browser.js(click)
    down = browser.js(read)
    assert down == sorted(down, reverse=True)
    browser.js(click)
    up = browser.js(read)
    assert up == sorted(down)
    assert len(up) > 5
    words = "const t=document.getElementById('ops');t.querySelectorAll('th')[0].click();"
    names = browser.js(words + "return [...t.tBodies[0].rows].map(r=>r.cells[0].textContent)")
    assert names == sorted(names, reverse=True)


def test_cells_without_a_value_are_last(browser, tmp_path):
    rows = [{"a": value} for value in (3.0, None, -2.0, None, 10.0)]
    (tmp_path / "page.html").write_text(page("t", "", [table("t", rows, ["a"])]))
    browser.open(tmp_path / "page.html")
    click = "const t=document.getElementById('t');t.querySelector('th').click();"
    read = click + "return [...t.tBodies[0].rows].map(r=>r.cells[0].textContent)"
    assert browser.js(read) == ["10", "3", "-2", "", ""]
    assert browser.js(read) == ["-2", "3", "10", "", ""]


@pytest.mark.parametrize("name", NAMES)
def test_texts_of_a_picture_do_not_cover_one_another(browser, pages, name):
    browser.open(pages / f"{name}.html")
    covered = browser.js(
        "const found=[];document.querySelectorAll('svg').forEach(s=>{const all=[...s.querySelectorAll('text')]"
        ".map(t=>[t.textContent,t.getBoundingClientRect()]);all.forEach(([n,a],i)=>all.slice(i+1).forEach(([m,b])=>{"
        "if(Math.min(a.right,b.right)-Math.max(a.left,b.left)>1&&Math.min(a.bottom,b.bottom)-Math.max(a.top,b.top)>4)"
        "found.push(n+' / '+m)}))});return found"
    )
    assert covered == []


@pytest.mark.parametrize("name", NAMES)
def test_headings_stay_while_a_long_table_scrolls(browser, pages, name):
    browser.open(pages / f"{name}.html")
    top = browser.js(
        "const t=document.getElementById('ops'),s=t.parentElement;s.style.maxHeight='150px';s.scrollTop=100;"
        "return t.querySelector('th').getBoundingClientRect().top-s.getBoundingClientRect().top"
    )
    assert abs(top) < 2


@pytest.mark.parametrize("name", NAMES)
def test_searching(browser, pages, name):
    browser.open(pages / f"{name}.html")
    type_in = "const i=document.querySelector('input[data-for=ops]');i.value='{}';i.dispatchEvent(new Event('input'));"
    shown = "return [...document.getElementById('ops').tBodies[0].rows].filter(r=>!r.hidden).map(r=>r.textContent)"
    rows = browser.js(type_in.format("backward mm") + shown)
    assert rows
    assert all("backward" in row and "mm" in row for row in rows)
    assert browser.js(type_in.format("no such op") + shown) == []
    assert len(browser.js(type_in.format("") + shown)) > len(rows)


@pytest.mark.parametrize("name", NAMES)
def test_fits_and_is_legible(browser, pages, name):
    browser.open(pages / f"{name}.html")
    assert browser.js("return document.documentElement.scrollWidth<=window.innerWidth")
    heights = browser.js(
        "return [...document.querySelectorAll('svg text:not(.small)')].map(t=>t.getBoundingClientRect().height)"
    )
    assert min(h for h in heights if h) >= 8
    outside = browser.js(
        "return [...document.querySelectorAll('svg text')].filter(t=>{const a=t.getBoundingClientRect(),"
        "b=t.ownerSVGElement.getBoundingClientRect();return a.right>b.right+1||a.left<b.left-1||a.bottom>b.bottom+1})"
        ".map(t=>t.textContent)"
    )
    assert outside == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", NAMES)
def test_screenshot(browser, pages, name, scheme, tmp_path):
    image = pytest.importorskip("matplotlib.image", reason="matplotlib reads the screenshot")
    browser.cdp("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    browser.open(pages / f"{name}.html")
    browser.screenshot(tmp_path / "page.png")
    pixels = (image.imread(tmp_path / "page.png")[..., :3] * 255).astype(int)
    codes = pixels[..., 0] * 65536 + pixels[..., 1] * 256 + pixels[..., 2]
    colours, counts = torch.from_numpy(codes).flatten().unique(return_counts=True)
    background = int(colours[counts.argmax()])
    brightness = (background >> 16) + (background >> 8 & 255) + (background & 255)
    assert (brightness > 600) if scheme == "light" else (brightness < 200)
    assert len(colours) > 30
    assert 0.02 < 1 - float(counts.max()) / codes.size < 0.98


def test_charts_of_nothing():
    assert "nothing" in bars([], "x")
    assert "nothing" in lines({"a": [(0, 0)]}, "x", "x", "y")
    assert "nothing" in table("t", [], ["a"])
    assert "<svg" in roofline([], 1e9, {"stream": 1e9}, "x")
    assert short(1234567) == "1.23M"
    assert short(0) == "0"
    assert (with_unit(2e6, "B"), with_unit(3.2, "ms"), with_unit(3.2, "")) == ("2MB", "3.2 ms", "3.2")
    assert "43.3%" in table("t", [{"share": 0.433}], ["share"])


def test_limits_of_scaling_and_more_lines_than_colours():
    data = as_data(datasets.load_graph("er:200:800"), width=16)
    slow, quick = (Machine(host=host, memory=1e10) for host in (1e-2, 1e-9))
    for machine, there in ((slow, True), (quick, False)):
        report = stretto.analyze(make("sage", 16, 8, 8), data, machine=machine, procs=[1, 2, 4, 8, 16])
        found = scaling(report)
        assert (HOST in found) == there
        assert found[LIMIT][0][1] == pytest.approx(report.seconds * 1e3)
        drawn = lines(found, "x", "workers", "ms", limits=[HOST, LIMIT])
        assert drawn.count('class="line l0"') == drawn.count('class="line l0 again"') == 2  # the line and its name
    assert LIMIT in scaling(stretto.analyze(make("sage", 16, 8, 8), data, machine=slow, procs=[1, 2]))
    alone = scaling(stretto.analyze(make("sage", 16, 8, 8), data, machine=slow, procs=[1]))
    assert lines(alone, "x", "workers", "ms") == "<p>nothing to show</p>"


def test_long_paths_differ_where_they_are_shortened():
    paths = ["x" * 150 + end for end in ("", ".lin", ".aggr_module")]
    found = [shortened(path) for path in paths]
    assert len(set(found)) == 3
    assert all(fitting(name) == name for name in found)
    assert shortened("convs.0.lin") == "convs.0.lin"


def test_ops_without_flops_are_on_the_roofline():
    """They have no place among flops: they stand on an axis of bytes per second, the slowest with their names."""
    moves = [(f"gather {i}", 1e9 * (i + 1), "gather latency", 0.1 / (i + 1)) for i in range(9)]
    drawn = roofline([("mm", 10.0, 1e9, "compute", 0.2)], 1e10, {"memory": 2e10}, "x", moves)
    assert drawn.count('class="point') == 10
    assert "gather 0 10%, 1GB/s" in drawn
    assert "3 others" in drawn
    assert drawn.count("memory: 20GB/s") == 2  # the roof stands in both pictures
    assert "without flops" not in roofline([], 1e9, {"stream": 1e9}, "x")


def test_every_op_with_a_time_is_plotted(pages):
    text = (pages / "profile.html").read_text()
    for title in ("Speed-up by site", "Speed-up by plan"):
        assert f"<h2>{title}" in text
    picture = text[text.index("roofline of the ops") : text.index("Time by op")]
    assert re.search(r"<title>gather \[[0-9x, ]+\]: [0-9.]+[kMG]?B/s", picture)
    assert re.search(r"<title>mm \[[0-9x, ]+\]: [0-9.]+[kMG]?flop/s", picture)


def test_what_is_gained_is_told_by_site_and_by_plan():
    row = {
        "site": "convs.0",
        "kind": "layer",
        "now": "GCNConv",
        "advice": "accelerate",
        "reason": "2x",
        "saves_ms": 3.0,
    }
    assert words.advice_line(row) == "convs.0, GCNConv: accelerate, saves 3 ms a step; 2x"
    assert words.advice_line({**row, "share": 0.4}).endswith("accelerate, saves 40% of a step (3 ms alone); 2x")
    assert words.advice_line({**row, "advice": "nothing to gain", "saves_ms": 0.0}).endswith("nothing to gain; 2x")
    plans = [{"plan": f"p{i}", "runs": i == 2, "speedup": float(i), "by": "predicted"} for i in range(1, 7)]
    drawn = words.plan_bars([{**row, "plans": [*plans, {**plans[0], "speedup": None}]}, row])
    assert [name for name, _, _ in drawn] == ["convs.0: p2", *(f"convs.0, predicted: p{i}" for i in (6, 5, 4))]
    assert words.plans_alike([{**row, "plans": plans}, row]) == ""
    assert words.plans_alike([{**row, "plans": [*plans, {**plans[0], "speedup": None, "by": words.ALIKE}]}]).endswith(
        ": p1."
    )


def test_text_is_escaped():
    assert "<script>" not in bars([("<script>", 1.0, "c1")], "x")
    assert "<script>" not in table("t", [{"a": "<script>"}], ["a"])
