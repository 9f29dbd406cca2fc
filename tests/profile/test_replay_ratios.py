"""What a replay says of an op: a ratio to its time in the model, with its own indices and with shuffled ones."""

import statistics

import stretto
from stretto import datasets
from stretto.analyze import Machine
from stretto.analyze.models import as_data, make
from stretto.profile import replay as replay_module
from stretto.profile.chain_run import run
from stretto.profile.replay import replay


def profiled():
    data = as_data(datasets.load_graph("er:2000:20000"), width=12)
    return stretto.profile(make("sage", 12, 8, 8), data, machine=Machine(), repeats=1)


def test_a_slower_replay_is_seen(monkeypatch):
    """The ratio is of the op itself: an op that takes longer outside the model is off by that much."""
    profile = profiled()

    def slow(tape, **options):
        recorder = run(tape, **options)
        recorder.times = [(name, 3 * seconds, gap) for name, seconds, gap in recorder.times]
        return recorder

    honest = {(r["op"], r["phase"], r["shapes"]): r["ratio"] for r in replay(profile, repeats=3, seconds=0)}
    monkeypatch.setattr(replay_module, "run", slow)
    rows = replay(profile, repeats=3, seconds=0)
    # In the middle of the ops: one of them alone may be disturbed by as much.
    assert statistics.median(row["ratio"] / honest[row["op"], row["phase"], row["shapes"]] for row in rows) > 1.5
    for row in rows:
        assert row["interval"][0] <= row["ratio"] <= row["interval"][1]


def test_the_effect_of_shuffled_indices_is_seen(monkeypatch):
    """Beside the replay with its own indices stands one with others, whose times are its own."""
    profile = profiled()

    def slow(tape, *, instead=None, **options):
        recorder = run(tape, instead=instead, **options)
        if instead:
            recorder.times = [(name, 5 * seconds, gap) for name, seconds, gap in recorder.times]
        return recorder

    monkeypatch.setattr(replay_module, "run", slow)
    rows = [row for row in replay(profile, repeats=3, seconds=0) if "shuffled indices" in row]
    assert rows
    assert statistics.median(row["shuffled indices"]["ratio"] / row["real indices"]["ratio"] for row in rows) > 2
