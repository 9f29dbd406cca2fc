"""What the charts of the two pages say: each has a caption, bars add up to the step, colours and limits are named."""

import re

import pytest
import torch
from torch import nn

import stretto.analyze
import stretto.profile
from stretto import datasets
from stretto.analyze import Machine
from stretto.analyze import page as analysis
from stretto.analyze.page import analysis_page
from stretto.observe.models import as_data, make
from stretto.page import charts
from stretto.page.captions import CAPTIONS
from stretto.page.svg import bars, lines
from stretto.profile import page as profiled
from stretto.profile.page import profile_page


@pytest.fixture(scope="module")
def data():
    return as_data(datasets.load_graph("er:100:400"), width=8)


@pytest.fixture(scope="module")
def profile(data):
    """Of more layers than there are bars."""
    torch.set_num_threads(1)
    return stretto.profile(make("gcn", 8, 8, 8, 20), data, machine=Machine(), repeats=1)


@pytest.fixture(scope="module")
def report(data):
    return stretto.analyze(make("gcn", 8, 8, 8, 20), data, machine=Machine(), procs=[1, 2, 4])


def cards(text):
    """Title -> what follows it."""
    return dict(re.findall(r"<h2>(.*?)</h2>(.*?)</section>", text, re.S))


def test_every_picture_and_table_begins_with_what_to_see(profile, report):
    pages = cards(profile_page(profile)) | cards(analysis_page(report))
    for title, body in pages.items():
        if "<svg" in body or "<table" in body:
            assert body.startswith('<p class="dim caption">'), title
    assert all(text.endswith(".") for text in CAPTIONS.values())


def test_bars_add_up_to_the_step(profile, report):
    step = profile.trace.step_seconds * 1e3
    in_groups = sum(group.seconds for group in profile.groups) * 1e3
    for rows, inside in (
        (profiled.by_op(profile), in_groups),
        (profiled.by_layer(profile), profile.trace.op_seconds * 1e3),
    ):
        # A traced pass on a busy machine may take longer inside ops than a plain step: then nothing is left of that.
        assert sum(ms for _, ms, _ in rows) == pytest.approx(max(step, inside))
    for found in (analysis.by_op(report), analysis.by_layer(report)):
        assert sum(ms for _, ms, _ in found) == pytest.approx(report.seconds * 1e3)
    names = [name for name, _, _ in analysis.by_layer(report)]
    assert len(names) == charts.TOP + 2
    assert names[charts.TOP].endswith(" others")


def test_what_is_left_of_the_whole():
    rows = [(f"{i}", 10.0, "c1") for i in range(charts.TOP + 3)]
    *_, more, left = charts.longest(rows, 200.0, "rest")
    assert (more[:2], left[:2]) == (("3 others", 30.0), ("rest", 50.0))
    assert charts.longest(rows[:2], 20.0, "rest") == rows[:2]
    assert charts.longest([], 0.0, "rest") == []


def test_colours_say_what_they_mean():
    drawn = bars([("a", 1.0, "c3"), ("b", 2.0, "c1")], "x", legend={"c1": "exact", "c4": "stale"})
    assert ">exact</text>" in drawn
    assert "stale" not in drawn


def test_two_limits_are_dashed_in_two_ways():
    drawn = lines({"a": [(1, 1.0), (2, 2.0)], "b": [(1, 1.0)], "c": [(1, 3.0)]}, "x", "x", "y", limits=["b", "c"])
    assert drawn.count('class="roof"') == drawn.count('class="roof again"') == 2  # the line and its name


def test_a_deep_model_has_a_short_page(profile):
    row = {"kind": "layer", "now": "GCNConv", "advice": "accelerate", "reason": "2x", "best": "stretto.accelerate"}
    plans = [{"plan": "p", "runs": True, "speedup": 2.0, "by": "measured"}]
    profile.advice = [
        {**row, "site": f"convs.{i}", "saves_ms": float(i), "speedup": (2.0, 1.0, 3.0), "plans": plans}
        for i in range(1, 41)
    ]
    told = cards(profile_page(profile))
    assert re.findall(r"<text[^>]*>(convs.\d+):", told["Speed-up by site"])[:2] == ["convs.40", "convs.39"]
    assert "28 more, which save less, are in the advice." in told["Speed-up by site"]
    assert told["Speed-up by plan, over stock"].count("<rect") == 4
    assert told["Advice"].count("<li>") == 40


class Nothing(nn.Module):
    """No op at all."""

    def forward(self, x, edge_index):
        return x


def test_a_step_without_ops_has_a_page(data):
    assert "<svg" in profile_page(stretto.profile(Nothing(), data, mode="infer", machine=Machine(), repeats=1))
