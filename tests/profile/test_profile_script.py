"""Scripts: their steps and models are found as they run, replayed, and run again with layers accelerated."""

import json

import pytest
import torch
from typer.testing import CliRunner

from stretto import StrettoError, cli
from stretto.analyze import Machine
from stretto.graph import graph
from stretto.machine.timing import Timing
from stretto.memory import allocator
from stretto.profile import script as scripts
from stretto.profile.recommend import NOTHING
from stretto.profile.script import alone, apply_script, profile_script
from stretto.profile.script_steps import Steps, run

HEAD = """
import sys
import torch
from torch_geometric.nn import GCNConv, SAGEConv, Linear
torch.manual_seed(0)
x, edge_index = torch.randn(40, 8), torch.randint(40, (2, 160))
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(8, 8), SAGEConv(8, 3)])
        self.norm = torch.nn.BatchNorm1d(8)
    def forward(self, x, edge_index=None):
        return self.convs[1](self.norm(self.convs[0](x, edge_index)).relu(), edge_index)
"""
TRAIN = (
    HEAD
    + """
net, loss = Net(), torch.nn.CrossEntropyLoss()
y = torch.randint(3, (40,))
optimizer = torch.optim.Adam(net.parameters())
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    loss(net(x, edge_index=edge_index), y).backward()
    optimizer.step()
    with torch.no_grad():
        net.eval()(x, edge_index).argmax(-1)
        net.train()
print("came to the end")
"""
)
ONE_LAYER = (
    HEAD
    + """
conv = GCNConv(8, 3)
optimizer = torch.optim.SGD(conv.parameters(), lr=1e-3)
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    conv(x, edge_index).sum().backward()
    optimizer.step()
"""
)
TWO_MODELS = (
    HEAD
    + """
first, second = Net(), torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1e-3)
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    second(first(x, edge_index)).sum().backward()
    optimizer.step()
"""
)
INFER = (
    HEAD
    + """
net = Net().eval()
for _ in range(int(sys.argv[1])):
    with torch.no_grad():
        net(x, edge_index)
"""
)
BY_HAND = (
    HEAD
    + """
net = Net()
for _ in range(int(sys.argv[1])):
    net.zero_grad()
    net(x, edge_index).sum().backward()
    with torch.no_grad():
        for p in net.parameters():
            p -= 1e-3 * p.grad
"""
)
NO_GNN = (
    HEAD
    + """
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
optimizer = torch.optim.Adam(net.parameters())
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    net(x).sum().backward()
    optimizer.step()
"""
)
UNUSED = (
    HEAD
    + """
net = Net()
optimizer = torch.optim.Adam(net.parameters())
net(x, edge_index)
"""
)


ACCUMULATED = (
    HEAD
    + """
net = Net()
optimizer = torch.optim.Adam(net.parameters())
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    for _ in range(3):
        net(x, edge_index).sum().backward()
    optimizer.step()
sys.exit()
"""
)
BATCHES = (
    HEAD
    + """
net = Net()
optimizer = torch.optim.Adam(net.parameters())
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    net(x, edge_index[:, torch.randperm(edge_index.size(1))]).sum().backward()
    optimizer.step()
"""
)
EVALUATED_ON_OTHERS = (
    TRAIN
    + """
raise AssertionError("never comes here")
"""
).replace(
    "net.eval()(x, edge_index).argmax(-1)",
    "[net.eval()(x, edge_index[:, order]) for order in (torch.arange(80), torch.arange(80, 160))]",
)


def profiled(script: str, steps: int = 40):
    return profile_script(script, [str(steps)], Machine(), repeats=2, budget=2.0)


def paced(monkeypatch, layer: float, step: tuple[float, ...] = ()):
    """Clocks: how many times faster each layer is alone, and the step in each pair of turns."""
    from stretto.profile import recommend

    monkeypatch.setattr(
        recommend,
        "_in_turns",
        lambda steps, *_: {n: Timing((layer if n.startswith("stock") else 1.0,) * 4) for n in steps},
    )
    if step:
        plain = scripts.realised
        timings = {"stock": Timing((1.0,) * len(step)), "accelerated": Timing(tuple(1 / s for s in step))}
        monkeypatch.setattr(scripts, "realised", lambda taken, chosen: plain(timings, chosen))


def test_command(written, tmp_path, monkeypatch):
    machine = tmp_path / "machine.json"
    Machine().save(machine)
    paced(monkeypatch, 3.0, (2.0,) * 6)
    words = ["profile", written(TRAIN), "60", "--machine", str(machine), "--repeats", "2", "--apply", "--replay"]
    words += ["--json", str(tmp_path / "p.json"), "--html", str(tmp_path / "p.html")]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    assert "came to the end" not in result.output  # it was stopped when enough was known
    found = json.loads((tmp_path / "p.json").read_text())
    assert {group["phase"] for group in found["groups"]} == {"forward", "backward", "optimizer"}
    assert {m for group in found["groups"] for m in group["modules"]} >= {"convs.0", "convs.1", "convs.0.lin_l", "norm"}
    assert 0 < found["attributed"] <= 1
    assert found["mode"] == "train"
    layers = [row for row in found["advice"] if row["kind"] == "layer"]
    assert [row["site"] for row in layers] == ["convs.0", "convs.1"]
    assert found["replays"]
    assert {row["op"] for row in found["replays"]} <= {group["op"] for group in found["groups"]}
    assert found["applied"]["applied"] is True
    assert "realised gain" in result.output
    assert ", predicted " in result.output
    assert "stretto.accelerate(model) in the script keeps it so" in result.output


@pytest.mark.parametrize(
    ("text", "unit", "mode", "sites"),
    [
        (TRAIN, "optimizer steps", "train", {"convs.0", "convs.1"}),
        (ONE_LAYER, "optimizer steps", "train", {"GCNConv"}),
        (TWO_MODELS, "optimizer steps", "train", {"Net.convs.0", "Net.convs.1"}),
        (INFER, "calls of its model", "infer", {"convs.0", "convs.1"}),
        (INFER.replace("Net()", "SAGEConv(8, 3)"), "calls of its model", "infer", {"SAGEConv"}),
        (BY_HAND, "calls of its model", "train", {"convs.0", "convs.1"}),
        (NO_GNN, "optimizer steps", "train", set()),
    ],
    ids=["train", "one layer", "two models", "infer", "infer one layer", "by hand", "no gnn"],
)
def test_steps_models_and_layers_are_found(written, text, unit, mode, sites):
    script = written(text)
    found = profiled(script)
    assert found.workload.mode == mode
    assert {row["site"] for row in found.advice} == sites
    paths = {path for group in found.groups for path in group.paths}
    assert paths >= sites
    with pytest.raises(StrettoError, match=rf"took \d {unit}, wanted at least"):
        profiled(script, 4)
    part = alone(found, repeats=1)
    assert {p for group in part.groups for p in group.paths} >= sites
    assert {g.phase for g in part.groups} == ({"forward"} if mode == "infer" else {"forward", "backward"})
    assert part.replay(repeats=1)


def test_a_models_part_has_the_gradients_of_the_script(written):
    """Parameters get from the calls alone what they got in the script's own step."""
    steps = Steps()
    run(written(TWO_MODELS.replace("lr=1e-3", "lr=0.0")), ["4"], steps)
    work = steps.workload
    assert [type(call.module).__name__ for call in work.calls] == ["Net", "Linear"]
    work.run()
    alone_grads = [p.grad.clone() for p in work.model.parameters()]
    first, second = (call.module for call in work.calls)
    work.model.zero_grad()
    args = work.calls[0].args
    second(first(*args)).sum().backward()
    for got, p in zip(alone_grads, work.model.parameters(), strict=True):
        assert torch.allclose(got, p.grad, atol=1e-6)


@pytest.mark.parametrize(("text", "calls", "more"), [(ACCUMULATED, 3, 0), (TRAIN, 1, 1)], ids=["3", "evaluated"])
def test_a_gain_counts_all_calls_of_a_step(written, monkeypatch, text, calls, more):
    """Those of an evaluation between two steps too."""
    paced(monkeypatch, 3.0)  # a layer takes 3 s and 1 s
    found = profiled(written(text))
    assert found.advice
    for row in found.advice:
        assert row["saves_ms"] == pytest.approx(2000 * (calls + more))
        assert (f"called {calls} times a step" in row["reason"]) == (calls != 1)
        assert ("1 time a step without gradients" in row["reason"]) == bool(more)


def test_a_script_that_exits_is_over(written):
    with pytest.raises(StrettoError, match="took 4 optimizer steps, wanted at least"):
        profiled(written(ACCUMULATED), 4)
    with pytest.raises(SystemExit):
        profiled(written(ACCUMULATED.replace("sys.exit()", "sys.exit('no data')")), 4)


def test_graphs_that_change_are_sorted_in_every_step(written, monkeypatch):
    """An accelerated layer of a stretto loader's batch knows its graph; that of any other must make it first."""
    from stretto.profile import recommend

    made, counted = [], {}
    plain = graph._build
    monkeypatch.setattr(graph, "_build", lambda *given: made.append(1) or plain(*given))

    def in_turns(steps, *_):
        for name, step in steps.items():
            made.clear()
            for _ in range(3):
                step()
            counted[name] = len(made)
        return {name: Timing((3.0 if name.startswith("stock") else 1.0,) * 4) for name in steps}

    monkeypatch.setattr(recommend, "_in_turns", in_turns)
    assert not any("another graph" in row["reason"] for row in profiled(written(TRAIN)).advice)
    assert set(counted.values()) == {0}
    found = profiled(written(BATCHES))
    assert all("every step with another graph" in row["reason"] for row in found.advice)
    # The second layer has the graph from the first.
    assert [counted[f"{kind}, convs.{i}"] for kind in ("stock", "accelerated") for i in (0, 1)] == [0, 0, 3, 0]


def test_evaluations_on_other_graphs_say_nothing_of_training(written, monkeypatch):
    paced(monkeypatch, 3.0, (2.0,) * 6)
    found = profiled(written(EVALUATED_ON_OTHERS))
    assert [row["site"] for row in found.advice if row["kind"] == "layer"] == ["convs.0", "convs.1"]
    assert not any("another graph" in row["reason"] for row in found.advice)


@pytest.mark.parametrize("words", [["--epochs", "3"], ["-e", "3"]])
def test_options_of_a_script_go_behind_two_dashes(written, words):
    result = CliRunner().invoke(cli.app, ["profile", written(TRAIN), *words])
    assert result.exit_code == 2
    assert "train.py -- --epochs" in " ".join(result.output.replace("│", " ").split())


def test_an_optimizer_that_never_steps(written):
    with pytest.raises(StrettoError, match="took 0 optimizer steps"):
        profiled(written(UNUSED))


@pytest.mark.parametrize("option", ["--graph", "--hidden", "--layers", "--mode", "--device"])
def test_options_that_a_script_has_no_use_for_are_refused(written, option):
    value = {"--hidden": "8", "--layers": "2", "--mode": "infer", "--device": "cpu"}.get(option, "cora")
    result = CliRunner().invoke(cli.app, ["profile", written(TRAIN), option, value])
    assert f"'{option}' is for a model that is named; options of a script go behind" in str(result.exception)


def test_nothing_to_gain_runs_nothing(written, monkeypatch):
    script = written(NO_GNN)
    found = profiled(script)
    monkeypatch.setattr(scripts, "run", lambda *_: pytest.fail("ran again"))
    assert apply_script(found, script, ["40"])["reason"] == "nothing to gain"
    found.advice = [{"advice": "nothing to gain", "saves_ms": 0.0}]
    assert apply_script(found, script, ["40"]) == NOTHING


def advised(written, monkeypatch, text: str = TRAIN, steps: int = 60):
    script = written(text)
    paced(monkeypatch, 3.0)
    found = profiled(script, steps)
    assert {row["advice"] for row in found.advice} == {"accelerate"}
    return found, script


def test_stock_and_accelerated_steps_take_turns(written, monkeypatch):
    found, script = advised(written, monkeypatch)
    seen = []
    plain = scripts._Turns.begins

    def begins(self):
        plain(self)
        seen.append((self._side, type(self.model.convs[0]).__module__, allocator.is_kept()))

    monkeypatch.setattr(scripts._Turns, "begins", begins)
    kept = allocator.is_kept()
    done = apply_script(found, script, ["60"])
    counted = [(side, module) for side, module, _ in seen if side]
    assert {(side, "stretto" in module) for side, module in counted} == {("stock", False), ("accelerated", True)}
    turns = [side for side, _ in counted]
    assert all({a, b} == {"stock", "accelerated"} for a, b in zip(turns[::2], turns[1::2], strict=False))
    assert len(turns) >= 2 * scripts.REPEATS
    assert done["stock"]["repeats"] == done["accelerated"]["repeats"] == scripts.REPEATS
    assert done["error"] < 1e-4
    assert done["speedup"][1] <= done["speedup"][0] <= done["speedup"][2]
    assert done["applied"] is (done["speedup"][1] > 1)
    assert allocator.is_kept() == kept


def test_a_tie_in_the_script_is_not_applied(written, monkeypatch):
    found, script = advised(written, monkeypatch)
    paced(monkeypatch, 3.0, (0.9, 1.2) * 4)
    done = apply_script(found, script, ["60"])
    assert not done["applied"]
    assert done["reason"].startswith("not applied: with 2 layers accelerated")
    assert "keeps it so" not in done["reason"]


def test_other_outputs_are_noticed(written, monkeypatch):
    from torch_geometric.nn import SAGEConv

    from stretto.plug.classes import fast_of

    found, script = advised(written, monkeypatch)
    wrong = lambda self, x, edge_index: 2 * SAGEConv.forward(self, x, edge_index)  # noqa: E731
    monkeypatch.setattr(fast_of(SAGEConv), "forward", wrong)
    assert apply_script(found, script, ["60"])["reason"].startswith("not applied: outputs differ by")


def test_too_few_steps_to_compare(written, monkeypatch):
    found, script = advised(written, monkeypatch)
    with pytest.raises(StrettoError, match=r"took \d+ optimizer steps, wanted at least \d+ to compare"):
        apply_script(found, script, ["10"])


def test_another_model_in_the_second_run(written, monkeypatch):
    found, _ = advised(written, monkeypatch)
    assert "no layer convs.0" in apply_script(found, written(NO_GNN), ["60"])["reason"]
