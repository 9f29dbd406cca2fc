"""The comparison of predicted with measured: it runs to its end, and its summary follows from its rows."""

import pytest
import torch
from typer.testing import CliRunner

from stretto import cli
from stretto.analyze import Machine, machine_file
from stretto.bench import results
from stretto.bench.analysis import Cell, Findings, summary
from stretto.bench.analysis_replays import Told, close, in_processes, merged, middle


def test_command(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(machine_file, "get", lambda **_: Machine())
    words = ["bench", "analysis", "--models", "sage", "--graphs", "er:100:400", "--threads", "1", "--repeats", "2"]
    result = CliRunner().invoke(
        cli.app, [*words, "--budget", "1", "--replays", "0.5", "--processes", "1", "--csv", str(tmp_path / "a.csv")]
    )
    assert result.exit_code == 0, result.output
    (row,) = results.load(tmp_path / "a.csv")
    assert (row["model"], row["graph"], row["threads"], row["replays"]) == ("sage", "er:100:400", "1", "yes")
    for plan in ("ours", "stock"):
        assert 0 <= int(row[f"replays_met_{plan}"]) <= int(row[f"replays_{plan}"]) != 0
        assert float(row[f"predicted_{plan}"]) > 0
        assert float(row[f"memory_{plan}"]) > 0
    assert float(row["ours_low"]) <= float(row["ours"]) <= float(row["ours_high"])
    assert int(row["hot_ops"]) > 0
    assert int(row["ways"]) >= 2
    assert "replay over in-model time, hot ops" in result.output.replace("\n", " ")


def cell(predicted, measured):
    rows = [{"plan": str(i), "predicted": p, "measured": m} for i, (p, m) in enumerate(zip(predicted, measured))]  # noqa: B905
    return Cell("gcn", "cora", 1, rows)


def test_summary_follows_the_rows():
    found = Findings(cells=[cell([1.0, 2.0], [1.5, 3.0]), cell([1.0, 2.0], [3.0, 2.5])])
    found.memory = [{"predicted": 100, "allocated": 110}, {"predicted": 100, "allocated": 200}]
    replay = {"plan": "as given", "hot": True, "shuffled": None}
    found.replays = [
        replay | {"ms": 9.0, "real": 1.1, "shuffled": 2.0, "verdict": "met"},
        replay | {"ms": 1.0, "real": 0.8, "verdict": "missed"},
        replay | {"ms": 5.0, "real": 3.0, "hot": False, "verdict": "unsteady"},
    ]
    found.reached = [{"reached": 0.4}, {"reached": 1.05}, {"reached": 1.3}]
    found.gains = [{"agreement": 0.9}, {"agreement": 1.3}, {"agreement": None}]
    text = {name: value for name, (value, _) in summary(found).items()}
    assert text["1 thread: step time predicted within 2x"] == "1 of 2 cells"
    assert text["1 thread: largest regret of the plan predicted fastest"] == "20% (gcn, cora)"
    assert text["peak memory, predicted over allocated"].startswith("1 of 2 within 15%")
    hot = text["as given: replay over in-model time, hot ops (90% of the time)"]
    assert hot.startswith("1 of 2 within 15%")
    assert hot.endswith("90.0% of the time of these")
    every = text["as given: replay over in-model time, all ops"]
    assert every.startswith("1 of 3")
    assert every.endswith("1 of the others unsteady in the model itself")
    assert text["hot ops over 10% faster than their ceiling"] == "1 of 3"
    assert text["replay with shuffled indices differs by over 15%"] == "1 of 1 ops with an index"
    assert text["gain of a step when the advice is applied, realised over predicted"].startswith("1 of 2 within 20%")


def test_replays_in_processes_of_their_own():
    """Real ones: each loads the graph, makes the model and replays it."""
    told = in_processes(2, "sgc", "er:100:400", Machine(), 1, "cpu", 0.2)
    assert {row["plan"] for row in told.replays} == {"as given", "accelerated"}
    assert max(len(row["each"]) for row in told.replays) == len(told.gain["each"])
    assert len(told.gain["each"]) in (2, 5)  # two and, where it was close, three more


def a_row(real, **more):
    given = {"plan": "as given", "op": "aten::mm", "phase": "forward", "shapes": "2x2", "hot": True, "ms": 1.0}
    given |= {"interval": (real - 0.1, real + 0.1), "itself": (0.95, 1.05), "turns": 20, "shuffled": None}
    return given | {"real": real, "verdict": ""} | more


def a_gain(agreement):
    return {"reason": "", "predicted gain ms": 2.0, "realised gain ms": 2.0 * (agreement or 0), "agreement": agreement}


def test_a_ratio_is_the_median_of_the_processes():
    found = merged(
        [[a_row(0.6), a_row(1.0)], [a_row(1.1), a_row(1.0)], [a_row(0.95), a_row(1.3, hot=False), a_row(2.0, op="new")]]
    )
    assert [r["real"] for r in found] == [0.95, 1.0, 2.0]
    assert [r["verdict"] for r in found] == ["met", "met", "missed"]
    assert found[0]["each"] == [0.6, 1.1, 0.95]
    assert found[0]["interval"] == (0.5, 1.2000000000000002)
    assert [r["hot"] for r in found] == [True, True, False]  # one of three processes has the last


def test_a_gain_is_the_median_of_the_processes():
    told = [Told([a_row(1.0)], a_gain(agreement)) for agreement in (0.7, 1.1, 1.0)]
    assert middle(told).gain["agreement"] == 1.0
    assert middle(told).gain["each"] == [0.7, 1.1, 1.0]
    assert middle([*told[:1], Told([], a_gain(None)), Told([], a_gain(None))]).gain["agreement"] is None


@pytest.mark.parametrize(
    ("replays", "agreement", "more"),
    [
        ([a_row(1.0)], 1.0, False),
        ([a_row(1.0)], None, False),
        ([a_row(0.89)], 1.0, True),  # met, but hardly
        ([a_row(1.5)], 1.0, True),
        ([a_row(1.5, hot=False)], 1.0, False),
        ([a_row(1.0)], 1.16, True),
        ([a_row(1.0)], 0.5, True),
    ],
)
def test_more_processes_where_it_is_close(replays, agreement, more):
    assert close(Told(replays, a_gain(agreement))) is more


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--models", "nope"], "no model 'nope'"),
        (["--graphs", "nope"], "no graph 'nope'"),
        (["--threads", "0"], "'--threads' is '0', wanted 1 or more"),
        (["--threads", "two"], "'--threads' is 'two'"),
        (["--workers", "-1"], "'--workers' is -1"),
        (["--csv", "nowhere/x.csv"], "there is no folder 'nowhere'"),
    ],
    ids=" ".join,
)
def test_wrong_words_are_told_before_the_machine_is_measured(words, said, monkeypatch):
    monkeypatch.setattr("stretto.analyze.machine_file.get", lambda *_, **__: pytest.fail("measured first"))
    assert said in str(CliRunner().invoke(cli.app, ["bench", "analysis", *words]).exception)
