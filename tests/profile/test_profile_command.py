"""The profiler's commands: scripts, built-in models, budgets."""

import json
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from stretto import cli, dist
from stretto.analyze import Machine
from stretto.errors import fail
from stretto.profile.terminal import show_advice

MACHINE = Machine()


def test_command(tmp_path):
    machine = tmp_path / "machine.json"
    MACHINE.save(machine)
    words = [
        "profile",
        "gcn",
        "--graph",
        "er:50:200",
        "--machine",
        str(machine),
        "--repeats",
        "1",
        "--share",  # on a busy machine one op may take 90% of a step
        "1",
        "--replay",
    ]
    result = CliRunner().invoke(cli.app, [*words, "--html", str(tmp_path / "p.html")])
    assert result.exit_code == 0, result.output
    assert "groups take 100%" in result.output
    replayed = result.output.partition("Replay with real and shuffled indices")[2].partition("nothing to gain")[0]
    assert "forward" in replayed
    assert "backward" in replayed  # of ops of one name and shape
    assert (tmp_path / "p.html").read_text().startswith("<!doctype html>")


def test_analyze_command(tmp_path, monkeypatch):
    """--validate asks for two workers; that they run is shown by tests/dist/test_analyzer.py."""
    asked = []
    for name in ("train",):
        monkeypatch.setattr(dist, name, lambda *args, name=name, **options: asked.append(name) or fail("none here"))
    machine, made = tmp_path / "machine.json", tmp_path / "mine.py"
    MACHINE.save(machine)
    made.write_text(
        "from stretto import datasets\nfrom stretto.observe.models import as_data, make\n"
        "def build():\n    data = as_data(datasets.load_graph('er:50:200'), width=8)\n"
        "    return make('sage', 8, 4, 8), data\n"
    )
    words = ["analyze", f"{made}:build", "--machine", str(machine), "--procs", "1,2", "--validate"]
    result = CliRunner().invoke(
        cli.app, [*words, "--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    )
    assert result.exit_code == 0, result.output
    assert "Strategies, fastest first" in result.output
    checks = json.loads((tmp_path / "a.json").read_text())["checks"]
    assert checks[0]["ratio"] == 1
    assert asked == ["train"] * 3  # in turn, overlapped, stale
    assert [row["note"] for row in checks if row["note"]] == ["failed: none here"] * 3
    bad = CliRunner().invoke(cli.app, ["analyze", "gcn", "--procs", "two"])
    assert "'--procs' is 'two'" in str(bad.exception)


WRONG = {
    "--share": ("2", "'--share' is 2.0"),
    "--repeats": ("0", "'--repeats' is 0"),
    "--html": ("nowhere/p.html", "no folder 'nowhere'"),
    "--json": ("nowhere/p.json", "no folder 'nowhere'"),
}


@pytest.mark.parametrize("option", WRONG)
@pytest.mark.parametrize("target", ["gcn", "script"])
def test_options_are_checked_before_any_work(option, target, monkeypatch, tmp_path):
    from stretto.cli import profile as command

    def work(*args, **kwargs):
        raise AssertionError("worked first")

    monkeypatch.setattr(command, "profile", work)
    monkeypatch.setattr(command, "profile_script", work)
    monkeypatch.setattr(command, "subject", work)
    monkeypatch.chdir(tmp_path)
    value, said = WRONG[option]
    words = ["profile", "train.py" if target == "script" else target, option, value]
    assert said in str(CliRunner().invoke(cli.app, words).exception)


def test_only_a_script_takes_arguments(monkeypatch):
    from stretto.cli import profile as command

    monkeypatch.setattr(command, "subject", lambda *_: pytest.fail("worked first"))
    result = CliRunner().invoke(cli.app, ["profile", "gcn", "--graph", "er:50:200", "30", "epochs"])
    assert "'30 epochs' follows 'gcn', but only a script takes arguments" in str(result.exception)


@pytest.mark.parametrize("graph", ["er:3:0", "er:1:0", "er:2:1"])
def test_graphs_with_next_to_nothing(graph, tmp_path):
    MACHINE.save(tmp_path / "machine.json")
    words = ["profile", "gat", "--graph", graph, "--machine", str(tmp_path / "machine.json"), "--repeats", "1"]
    words += ["--replay", "--apply", "--json", str(tmp_path / "p.json")]
    result = CliRunner().invoke(cli.app, [*words, "--html", str(tmp_path / "p.html")])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "p.json").read_text())["replays"]


def test_names_with_brackets_are_printed(capsys):
    """rich would take x[index] for a style."""
    row = {"site": "convs.0", "now": "Mine[x]", "advice": "use x[index]", "reason": "x[index]: 2x", "saves_ms": 0.0}
    show_advice(Console(width=200), SimpleNamespace(advice=[row]))
    assert "use x[index]; x[index]: 2x" in capsys.readouterr().out


def test_analyze_looks_where_it_will_write_first(monkeypatch, tmp_path):
    from stretto.cli import analyze as command

    monkeypatch.setattr(command, "subject", lambda *_: pytest.fail("worked first"))
    result = CliRunner().invoke(cli.app, ["analyze", "gcn", "--html", str(tmp_path)])
    assert "which is a folder" in str(result.exception)
