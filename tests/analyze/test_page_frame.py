"""What every page has, whatever stands on it: it sorts by keyboard, prints, takes long names, needs no script."""

import math
from html.parser import HTMLParser

import pytest

from stretto.page.frame import card, items, numbers, page, table
from stretto.page.svg import bars, fitting, lines, roofline
from stretto.page.text import duration, short
from tests.analyze.browser import opened

LONG = "AVeryLongNameOfAModule" * 20
ODD = 'a<b>&"quoted"\'s [x] naïve_图'


@pytest.fixture(scope="module", params=[(1280, 900), (360, 740)], ids=["desktop", "phone"])
def browser(request):
    yield from opened(*request.param)


@pytest.fixture
def show(browser, tmp_path):
    """A page of these parts, open in the browser."""

    def write(*parts, title="t"):
        (tmp_path / "page.html").write_text(page(title, title, parts))
        browser.open(tmp_path / "page.html")
        return browser

    return write


def column(browser, place=0):
    return browser.js(f"return [...document.getElementById('t').tBodies[0].rows].map(r=>r.cells[{place}].textContent)")


def test_long_names_stay_on_the_page(show):
    rows = [{"name": LONG, "value": 1.0}, {"name": ODD, "value": 2.0}]
    shown = show(
        numbers({"x": LONG}), card(LONG, items([LONG, ODD])), table("t", rows, ("name", "value")),
        card("c", bars([(name, 1.0, "c1") for name in (LONG, ODD, "W" * 99, "图" * 99, "a_" * 99)], "x")), title=LONG,
    )  # fmt: skip
    assert shown.js("return document.documentElement.scrollWidth<=window.innerWidth")
    cut = shown.js(
        "return [...document.querySelectorAll('h1,h2,li,p,b')].filter(e=>e.scrollWidth>e.clientWidth+1"
        "&&getComputedStyle(e).display!=='inline').map(e=>e.tagName)"
    )
    assert cut == []
    right = "const right=e=>e.getBoundingClientRect().right,s=document.querySelector('svg');"
    assert shown.js(right + "return [...s.querySelectorAll('text')].every(t=>right(t)<=right(s)+1)")
    assert shown.js("const s=document.querySelector('.scroll');return s.scrollWidth<=s.clientWidth+1")
    assert ODD in column(shown)


COVERED = (
    "const found=[];document.querySelectorAll('svg').forEach(s=>{const all=[...s.querySelectorAll('text')]"
    ".map(t=>[t.textContent,t.getBoundingClientRect()]);all.forEach(([n,a],i)=>all.slice(i+1).forEach(([m,b])=>{"
    "if(Math.min(a.right,b.right)-Math.max(a.left,b.left)>1&&Math.min(a.bottom,b.bottom)-Math.max(a.top,b.top)>4)"
    "found.push(n+' / '+m)}))});return found"
)


@pytest.mark.parametrize("workers", [(1, 2, 3), range(1, 17), (1, 2, 1000, 1_000_000), (4,), (30, 31, 32)], ids=str)
def test_marks_of_an_axis_stand_apart(show, workers):
    for low, high in ((1e-4, 2e8), (1e-7, 3e-6), (5.0, 5.0)):
        ends = [(p, low if i % 2 else high) for i, p in enumerate(workers)]
        shown = show(card("c", lines({"a": ends}, "x", "workers", "ms a step")))
        assert shown.js(COVERED) == []
        marks = shown.js("return [...document.querySelectorAll('svg text.dim')].map(t=>t.textContent)")
        assert short(max(workers)) in marks


@pytest.mark.parametrize("key", ["\ue007", " "], ids=["enter", "space"])
def test_headings_sort_by_keyboard(show, key):
    shown = show(table("t", [{"a": 1.0}, {"a": 3.0}, {"a": 2.0}], ["a"]))
    shown.js("document.querySelector('#t th button').focus()")
    stroke = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
    shown.ask("/actions", {"actions": [{"type": "key", "id": "keys", "actions": stroke}]})
    assert column(shown) == ["3", "2", "1"]
    assert shown.js("return document.querySelector('#t th').getAttribute('aria-sort')") == "descending"
    assert shown.js("return getComputedStyle(document.activeElement).outlineStyle") != "none"


def test_sorting_knows_numbers_wherever_they_stand(show):
    values = [math.inf, 2.0, math.nan, -math.inf, 1500.0]
    names = ["convs.10", "convs.9", "convs.2", "lin", "convs.10.lin"]
    ends = [(0.5, 0.7), (12.0, 13.0), (1.5, 2.0), (0.06, 0.08), (3.0, 4.0)]
    rows = [{"v": v, "name": n, "ci": c} for v, n, c in zip(values, names, ends, strict=True)]
    shown = show(table("t", rows, ("v", "name", "ci")))
    click = "document.querySelectorAll('#t th')[{}].click();".format
    shown.js(click(0))
    assert column(shown) == ["∞", "1.5k", "2", "-∞", ""]
    shown.js(click(1) * 2)
    assert column(shown, 1) == ["convs.2", "convs.9", "convs.10", "convs.10.lin", "lin"]
    shown.js(click(2))
    assert [text.split()[0] for text in column(shown, 2)] == ["12", "3", "1.5", "0.5", "0.06"]


def test_what_is_typed_survives_sorting(show):
    shown = show(table("t", [{"a": name} for name in ("one two", "two", "three two", "four")], ["a"]))
    shown.js("const i=document.querySelector('input');i.value='TWO';i.dispatchEvent(new Event('input'));")
    shown.js("document.querySelector('#t th').click()")
    read = "return [...document.getElementById('t').tBodies[0].rows].filter(r=>!r.hidden).map(r=>r.textContent)"
    assert shown.js(read) == ["two", "three two", "one two"]


def test_paper_has_all_rows_and_no_controls(show):
    shown = show(card("c", table("t", [{"a": float(i)} for i in range(200)], ["a"])))
    shown.cdp("Emulation.setEmulatedMedia", {"media": "print"})
    whole = shown.js("const s=document.querySelector('.scroll');return s.scrollHeight<=s.clientHeight+1")
    search = shown.js("return getComputedStyle(document.querySelector('input')).display")
    wide = shown.js("return getComputedStyle(document.querySelector('.card')).overflow")  # of a table with many columns
    shown.cdp("Emulation.setEmulatedMedia", {"media": ""})
    assert (whole, search, wide) == (True, "none", "visible")


def test_without_script_nothing_looks_as_if_it_worked(show):
    shown = show(table("t", [{"a": 1.0}], ["a"]))
    shown.cdp("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        shown.ask("/refresh", {})
        (search,) = shown.ask("/elements", {"using": "css selector", "value": "input"})
        assert shown.ask(f"/element/{next(iter(search.values()))}/css/display") == "none"
    finally:
        shown.cdp("Emulation.setScriptExecutionDisabled", {"value": False})


class Elements(HTMLParser):
    """Opening and closing tags must match, ids must be unique."""

    EMPTY = ("meta", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_tags_match():
    read = Elements()
    rows = [{"a": ODD, "b": True, "c": 1.0, "d": (1.0, 2.0), "share": 0.5}]
    drawn = roofline([(ODD, 1.0, 1e9, "compute", 0.1)], 1e10, {ODD: 1e9}, ODD, [(ODD, 1e9, "launch", 0.1)])
    read.feed(page(ODD, ODD, [numbers({ODD: ODD}), card(ODD, drawn), table("t", rows, ("a", "b", "c", "d", "share"))]))
    assert read.open == []
    assert read.ids == ["t"]


def test_charts_take_numbers_that_are_not_finite():
    odd = [("good", 2.0, "c1"), ("infinite", math.inf, "c1"), ("none", math.nan, "c1")]
    texts = (
        bars(odd, "x"), bars(odd, "x", log=True), bars(odd[1:], "x"),
        lines({"a": [(1, 2.0), (2, math.inf), (4, math.nan)]}, "x", "x", "y"),
        roofline([("a", 1.0, math.inf, "compute", 1.0)], 1e9, {"m": 1e9}, "x", [("b", math.inf, "launch", 1.0)]),
    )  # fmt: skip
    for drawn in texts:
        assert "nan" not in drawn
        assert "inf " not in drawn
        assert '"inf' not in drawn
    assert "∞" in texts[0]


def test_a_name_is_cut_only_where_it_must():
    assert fitting("a" * 58) == "a" * 58
    assert fitting("a" * 59) == "a" * 57 + "…"


def test_numbers_in_words():
    assert [short(v) for v in (999.7, 999_700, 0.5, 1e15)] == ["1k", "1M", "0.5", "1P"]
    assert [short(v) for v in (math.inf, -math.inf, math.nan)] == ["∞", "-∞", "unknown"]
    assert [duration(v) for v in (999.7e-6, 0.9998, 1234.0, 0.0)] == ["1 ms", "1 s", "1.23k s", "0 us"]
    assert duration(math.inf) == "∞ s"
