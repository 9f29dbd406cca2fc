"""The profiler's commands: scripts, built-in models, budgets."""

import json

import pytest
import torch
from typer.testing import CliRunner

from stretto import StrettoError, cli
from stretto.analyze import Machine
from stretto.profile.command import seconds

MACHINE = Machine()


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


SCRIPT = """
import sys
import torch
from torch_geometric.nn import GCNConv
x, edge_index = torch.randn(40, 8), torch.randint(40, (2, 160))
conv = GCNConv(8, 3)
optimizer = torch.optim.Adam(conv.parameters())
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    conv(x, edge_index).sum().backward()
    optimizer.step()
print("came to the end")
"""


def test_script(tmp_path):
    script, machine = tmp_path / "train.py", tmp_path / "machine.json"
    script.write_text(SCRIPT)
    MACHINE.save(machine)
    words = ["profile", str(script), "50", "--machine", str(machine), "--repeats", "2", "--apply"]
    result = CliRunner().invoke(
        cli.app, [*words, "--json", str(tmp_path / "p.json"), "--html", str(tmp_path / "p.html")]
    )
    assert result.exit_code == 0, result.output
    assert "came to the end" not in result.output  # it was stopped when enough was known
    found = json.loads((tmp_path / "p.json").read_text())
    assert {group["phase"] for group in found["groups"]} == {"forward", "backward", "optimizer"}
    assert any(m.startswith("GCNConv") for group in found["groups"] for m in group["modules"])
    assert 0 < found["attributed"] <= 1
    assert "realised gain" in result.output
    assert ", predicted " in result.output
    (row,) = found["advice"]
    assert (row["now"], row["advice"] in ("accelerate", "nothing to gain")) == ("GCNConv", True)
    assert found["applied"]["predicted_ms"] == row["saves_ms"]


def test_script_without_enough_steps(tmp_path):
    script, machine = tmp_path / "train.py", tmp_path / "machine.json"
    script.write_text(SCRIPT)
    MACHINE.save(machine)
    result = CliRunner().invoke(cli.app, ["profile", str(script), "2", "--machine", str(machine)])
    assert isinstance(result.exception, StrettoError)
    assert "2 optimizer steps" in str(result.exception)


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
        "--replay",
        "--sweep",
    ]
    result = CliRunner().invoke(cli.app, [*words, "--budget", "0.2s", "--html", str(tmp_path / "p.html")])
    assert result.exit_code == 0, result.output
    assert "groups take 90%" in result.output
    assert (tmp_path / "p.html").read_text().startswith("<!doctype html>")


def test_analyze_command(tmp_path):
    machine, made = tmp_path / "machine.json", tmp_path / "mine.py"
    MACHINE.save(machine)
    made.write_text(
        "from stretto import datasets\nfrom stretto.analyze.models import as_data, make\n"
        "def build():\n    data = as_data(datasets.load_graph('er:50:200'), width=8)\n"
        "    return make('sage', 8, 4, 8), data\n"
    )
    words = ["analyze", f"{made}:build", "--machine", str(machine), "--procs", "1,2", "--validate"]
    result = CliRunner().invoke(
        cli.app, [*words, "--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    )
    assert result.exit_code == 0, result.output
    assert "strategies, fastest first" in result.output
    assert json.loads((tmp_path / "a.json").read_text())["checks"][0]["ratio"] == 1
    bad = CliRunner().invoke(cli.app, ["analyze", "gcn", "--procs", "two"])
    assert "'--procs' is 'two'" in str(bad.exception)


@pytest.mark.parametrize(("text", "value"), [("60s", 60), ("2m", 120), ("5", 5), ("0.5s", 0.5)])
def test_budgets(text, value):
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "soon", "-3s", "s"])
def test_wrong_budgets(text):
    with pytest.raises(StrettoError, match="--budget"):
        seconds(text)
