"""The four schedules: what runs while what is under way, by cause (a rank held until the other came) and by events."""

import pytest
import torch

from stretto import StrettoError
from stretto.dist import SCHEDULES, Link, Schedule, Staleness, launch
from tests.dist.ranks import gates, sample, timelines
from tests.graphs import symmetric_edges

RANKS, LAYERS, LAST = 2, 3, 1
WAYS = [(micro, macro) for micro in ("sync", "async") for macro in ("sync", "async")]
FRESH, STALE = Staleness(), Staleness.halo(1)


def graph():
    data = sample(symmetric_edges(60, 120, 2), 60, 8, 3, torch.float32)
    return data, torch.arange(60) // 30


# micro: rank 1 is held in its graph op until rank 0 begins the neural op of that layer.
MICRO = [(Schedule(*way), FRESH, 0, ("graph op", 1), ("neural op", 1), way[0] == "async") for way in WAYS]
# macro: rank 1 is held in its neural op until rank 0 begins the next layer's graph op, on rows that need no others.
MACRO = [(Schedule(*way), FRESH, 0, ("neural op", 1), ("graph op", 2), way[1] == "async") for way in WAYS]
# stale: with rows of the last step rank 0 gets through all layers while rank 1 is held in the first; not with fresh.
AHEAD = [
    (Schedule("async", "async"), kind, 2, ("graph op", 1), ("neural op", 3), kind is STALE) for kind in (FRESH, STALE)
]


@pytest.fixture(scope="module")
def seen():
    data, owner = graph()
    return launch(both, RANKS, data, owner, limit=200)


def both(data, owner):
    """All that this file looks at, in one set of ranks."""
    link = Link(latency=0.1)
    fresh, stale = (timelines(data, owner, link, staleness) for staleness in (FRESH, STALE))
    return gates(data, owner, [*MICRO, *MACRO, *AHEAD]), fresh, stale


@pytest.mark.parametrize("number", range(len([*MICRO, *MACRO, *AHEAD])))
def test_a_rank_goes_on_without_the_other_just_where_the_schedule_lets_it(seen, number):
    expected = [*MICRO, *MACRO, *AHEAD][number][-1]
    assert seen[1][0][number] is expected


def events(seen, way, *, stale=False, **wanted):
    """Events of all ranks in the last step that have these attributes."""
    found = [e for rank in seen for e in rank[2 if stale else 1][way][1] if e.step == LAST]
    return [e for e in found if all(getattr(e, key) == value for key, value in wanted.items())]


def one(seen, way, **wanted):
    (event,) = events(seen, way, **wanted)
    return event


@pytest.mark.parametrize("way", WAYS)
def test_every_event_is_there_once(seen, way):
    micro, macro = way
    pieces = ("all",) if macro == "sync" else ("interior", "boundary")
    for rank in range(RANKS):
        for layer in range(1, LAYERS + 1):
            here = {"rank": rank, "layer": layer, "phase": "forward"}
            for rows in pieces:
                one(seen, way, kind="graph op", rows=rows, **here)
            for rows in pieces if micro == "async" else ("all",):
                one(seen, way, kind="neural op", rows=rows, **here)
            one(seen, way, kind="exchange", **here)
            assert len(events(seen, way, kind="barrier", **here)) == (micro == "sync")
            backward = events(seen, way, kind="exchange", rank=rank, layer=layer, phase="backward")
            assert len(backward) == (layer > 1)  # the features need no gradient
        one(seen, way, kind="sum", rank=rank)


@pytest.mark.parametrize("way", WAYS)
def test_exchange_and_interior_rows(seen, way):
    """async macro: the exchange is in flight while interior rows are aggregated; sync: nothing runs meanwhile."""
    overlaps = []
    for rank in range(RANKS):
        for layer in range(1, LAYERS + 1):
            here = {"rank": rank, "layer": layer, "phase": "forward"}
            flight = one(seen, way, kind="exchange", **here)
            if way[1] == "sync":
                assert flight.end <= one(seen, way, kind="graph op", rows="all", **here).begin
                continue
            interior = one(seen, way, kind="graph op", rows="interior", **here)
            boundary = one(seen, way, kind="graph op", rows="boundary", **here)
            assert flight.begin <= interior.begin
            assert flight.end <= boundary.begin
            wait = one(seen, way, kind="wait", **here)
            assert interior.end <= wait.begin
            assert wait.end <= boundary.begin
            overlaps.append(flight.overlaps(interior))
            if way[0] == "async":
                assert one(seen, way, kind="neural op", rows="interior", **here).end <= wait.begin
    assert way[1] == "sync" or any(overlaps)  # any: a busy machine may hold a rank for longer than a flight takes


@pytest.mark.parametrize("way", WAYS)
def test_returning_gradients_and_interior_rows(seen, way):
    """async both: gradients travel back while those of interior rows are computed; one piece: they can only follow."""
    for rank in range(RANKS):
        for layer in range(2, LAYERS + 1):
            here = {"rank": rank, "layer": layer, "phase": "backward"}
            flight = one(seen, way, kind="exchange", **here)
            if way == ("async", "async"):
                interior = one(seen, way, kind="graph op", rows="interior", **here)
                assert one(seen, way, kind="graph op", rows="boundary", **here).begin <= flight.begin
                assert flight.begin <= interior.begin
                assert interior.end <= one(seen, way, kind="wait", **here).begin
            elif way == ("async", "sync"):
                assert one(seen, way, kind="graph op", rows="all", **here).end <= flight.begin


@pytest.mark.parametrize("way", WAYS)
def test_stages_of_a_layer_across_ranks(seen, way):
    """sync micro: every rank's graph op ends before any rank's neural op begins."""
    for layer in range(1, LAYERS + 1):
        here = {"layer": layer, "phase": "forward"}
        aggregated = max(e.end for e in events(seen, way, kind="graph op", **here))
        updated = min(e.begin for e in events(seen, way, kind="neural op", **here))
        if way[0] == "sync":
            assert aggregated <= updated


@pytest.mark.parametrize("way", WAYS)
def test_stale_rows_are_under_way_for_a_whole_step(seen, way):
    """T^R = 1: the exchange of this step is used in the next: it may still be under way when the graph op begins."""
    late = []
    for rank in range(RANKS):
        here = {"rank": rank, "layer": LAYERS, "phase": "forward", "stale": True}
        flight = one(seen, way, kind="exchange", **here)
        late += [flight.end > e.begin for e in events(seen, way, kind="graph op", **here)]
    assert any(late)


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_schedules_change_no_result_and_synchronise_as_often_as_predicted(seen, way, stale):
    for rank in range(RANKS):
        first = seen[rank][2 if stale else 1][WAYS[0]]
        losses, _, traffic = seen[rank][2 if stale else 1][way]
        assert losses == pytest.approx(first[0], rel=1e-5)
        # A wait for rows of this very step and a barrier in every layer and its gradient, and the sum of gradients.
        passes = LAYERS + (LAYERS - 1)
        assert traffic[-1].syncs == passes * ((not stale) + (way[0] == "sync")) + 1
        assert (traffic[-1].bytes, traffic[-1].messages) == (first[2][-1].bytes, first[2][-1].messages)


def test_schedules_have_names():
    assert list(SCHEDULES) == [f"{micro} micro, {macro} macro" for micro, macro in WAYS]
    with pytest.raises(StrettoError, match="'macro' is 'later'"):
        Schedule("sync", "later")
