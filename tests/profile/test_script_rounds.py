"""Scripts of several models, with an encode of their own, compiled, or that do not come to their end."""

import json
import os

import pytest
import torch
from typer.testing import CliRunner

from stretto import StrettoError, cli
from stretto.analyze import Machine
from stretto.profile import script as scripts
from stretto.profile.profiling import Profile
from stretto.profile.rounds import Rounds
from stretto.profile.script import apply_script, profile_script

HEAD = """
import sys
import torch
from torch_geometric.nn import GCNConv, SAGEConv
torch.manual_seed(0)
x, edge_index = torch.randn(40, 8), torch.randint(40, (2, 160))
class Net(torch.nn.Module):
    def __init__(self, wide=8):
        super().__init__()
        self.one, self.two = SAGEConv(8, wide), SAGEConv(wide, 3)
    def forward(self, x, edge_index):
        return self.two(self.one(x, edge_index).relu(), edge_index)
    def encode(self, x, edge_index):
        return self.forward(x, edge_index)
def step(net, optimizer, call=None):
    optimizer.zero_grad()
    (call or net)(x, edge_index).sum().backward()
    optimizer.step()
"""
ADAM = "torch.optim.Adam({}.parameters())"
GAN = f"""{HEAD}
a, b = Net(4), torch.nn.Linear(8, 2)
first, second = {ADAM.format("a")}, {ADAM.format("b")}
for i in range(int(sys.argv[1])):
    for _ in range(2):
        step(a, first)
    step(b, second, lambda x, _: b(x * a(x, edge_index).detach().sum()))
"""
ALIKE = f"""{HEAD}
nets = [Net(), Net()]
optimizers = [{ADAM.format("net")} for net in nets]
for _ in range(int(sys.argv[1])):
    for net, optimizer in zip(nets, optimizers):
        step(net, optimizer)
"""
TWO_OF_ONE = f"""{HEAD}
net = Net()
first, second = {ADAM.format("net.one")}, {ADAM.format("net.two")}
for _ in range(int(sys.argv[1])):
    net(x, edge_index).sum().backward()
    first.step()
    second.step()
"""
FOLDS = f"""{HEAD}
for _ in range(int(sys.argv[1])):
    net = Net()
    optimizer = {ADAM.format("net")}
    for _ in range(3):
        step(net, optimizer)
"""
ONE_AFTER_THE_OTHER = f"""{HEAD}
for wide in (4, 8):
    net = Net(wide)
    optimizer = {ADAM.format("net")}
    for _ in range(7 if wide == 4 else int(sys.argv[1])):
        step(net, optimizer)
"""
ENCODE = f"""{HEAD}
net = Net()
optimizer = {ADAM.format("net")}
for _ in range(int(sys.argv[1])):
    step(net, optimizer, net.encode)
"""
ENCODE_LAYERS = ENCODE.replace("self.forward(x, edge_index)", "self.two(self.one(x, edge_index), edge_index)")
ODD = f"""{HEAD}
net = Net()
optimizer = {ADAM.format("net")}
for i in range(int(sys.argv[1])):
    step(net, optimizer)
    if i == 3:  # just before the step that is traced in full
        x.cumsum(0)
"""
COMPILED = f"""{HEAD}
net = Net()
net.compile(backend="eager")
optimizer = {ADAM.format("net")}
for i in range(int(sys.argv[1])):
    step(net, optimizer)
"""
FAILS = f"""{HEAD}
net = Net()
optimizer = {ADAM.format("net")}
for i in range(60):
    if i == int(sys.argv[1]):
        raise {{}}
    step(net, optimizer)
"""
KEEPS = (
    HEAD
    + """
import copy, pathlib
net = Net()
optimizer = torch.optim.Adam(net.parameters())
for i in range(int(sys.argv[1])):
    optimizer.zero_grad()
    net(x, edge_index).sum().backward()
    optimizer.step()
    best = copy.deepcopy(net)
    kept = pathlib.Path(__file__).with_name("best.pt")
    torch.save([net, best], kept)
    for again in torch.load(kept, weights_only=False):
        assert torch.equal(again(x, edge_index), net(x, edge_index))
    assert b"stretto" not in kept.read_bytes()
"""
)
CLIPS = (
    HEAD
    + """
net = Net()
optimizer = torch.optim.Adam(net.parameters())
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    net(x, edge_index).sum().backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
"""
)
CLOSURE = (
    HEAD
    + """
net = Net()
optimizer = torch.optim.LBFGS(net.parameters(), lr=1e-3, max_iter=2, history_size=2)
def closure():
    optimizer.zero_grad()
    out = net(x, edge_index).square().sum()
    out.backward()
    return out
for _ in range(int(sys.argv[1])):
    optimizer.step(closure)
"""
)


def profiled(script: str, steps: int = 30) -> Profile:
    return profile_script(script, [str(steps)], Machine(), repeats=2, budget=2.0)


def calls(found: Profile) -> dict[str, tuple[float, float]]:
    return {row["site"]: (row["calls"], row["forward"]) for row in found.advice}


def optimized(found: Profile) -> int:
    """Calls of the op with which Adam ends the update of a parameter."""
    return sum(len(g.ops) for g in found.groups if g.name.startswith("aten::addcdiv_"))


@pytest.mark.parametrize(
    ("text", "makeup", "sites", "updates"),
    [
        (GAN, "3 steps of 2", {"Net.one": (2, 1), "Net.two": (2, 1)}, 14),
        (ALIKE, "2 steps of 2", {f"Net{n}.{part}": (1, 0) for n in ("", " 2") for part in ("one", "two")}, 12),
        (TWO_OF_ONE, "2 steps of 2", {"one": (1, 0), "two": (1, 0)}, 6),
    ],
    ids=["gan", "two of a kind", "two optimizers of one model"],
)
def test_a_step_is_a_round_of_optimizers(written, paced, text, makeup, sites, updates):
    script = written(text)
    found = profiled(script)
    assert found.remarks == [f"a step is a round: {makeup} optimizers"]
    assert calls(found) == sites
    assert optimized(found) == updates  # of all models, in one trace
    for row in found.advice:
        assert row["saves_ms"] == pytest.approx(2000 * sum(sites[row["site"]]))
    with pytest.raises(StrettoError, match="rounds of its 2 optimizers, wanted at least"):
        profiled(script, 4)
    done = apply_script(found, script, ["70"])
    assert done["stock"]["repeats"] == scripts.REPEATS
    assert done["error"] < 1e-4


@pytest.mark.parametrize("text", [FOLDS, ONE_AFTER_THE_OTHER], ids=["folds", "one, then another"])
def test_an_optimizer_that_takes_the_place_of_another(written, paced, text):
    found = profiled(written(text))
    assert not found.remarks
    assert optimized(found) == 6
    widths = {g.shapes for g in found.groups if g.name == "aten::addmm" and g.phase == "forward"}
    assert not any("x4" in shapes for shapes in widths)  # of the second model alone


def test_layers_save_no_more_than_the_step(written, paced):
    """Alone, on a machine that is busier by then, they may take longer than the step took with all else."""
    found = profiled(written(GAN))  # of milliseconds; each layer took 3 s
    assert sum(row["share"] for row in found.advice) == pytest.approx(2 / 3)


EVALUATED = f"""{HEAD}
net = Net()
optimizer = {ADAM.format("net")}
for _ in range(int(sys.argv[1])):
    step(net, optimizer, lambda x, edge_index: net(torch.nn.functional.dropout(x), edge_index))
    with torch.no_grad():
        net(x, edge_index)
"""


def test_evaluations_are_timed_on_their_own_inputs(written, paced, monkeypatch):
    """Training sees features after a Dropout, others in every step; the evaluation sees those of the data."""
    seen = {}

    def advice(sites, *given, **named):
        seen.update(sites)
        return []

    monkeypatch.setattr(scripts, "layer_advice", advice)
    profiled(written(EVALUATED))
    site = seen["one"]
    assert (site.calls, site.forward) == (1, 1)
    assert id(site.args[0]) in site.changing
    assert id(site.args[1]) not in site.changing
    assert site.evaluation.args[0] is not site.args[0]
    assert not site.evaluation.changing
    assert id(seen["two"].evaluation.args[0]) in seen["two"].evaluation.changing


def test_rounds():
    def adam(*shape):
        return torch.optim.Adam([torch.nn.Parameter(torch.zeros(shape))])

    a, b, other = adam(2), adam(3), adam(2)
    rounds = Rounds()
    assert [rounds.stepped(o) for o in (a, a, b, a, b, a, a, b)] == ["ends", "ends", "anew", "", "ends", "", "", "ends"]
    assert rounds.makeup == (0, 0, 1)
    again = Rounds(rounds.kinds)
    assert [again.stepped(o) for o in (other, adam(5), b)] == ["", "", "ends"]
    assert again.kinds == rounds.kinds
    folds = Rounds()
    assert [folds.stepped(o) for o in (a, a, other, other)] == ["ends"] * 4
    assert folds.stepped(a) == "anew"  # it was not gone


@pytest.mark.parametrize("text", [ENCODE, ENCODE_LAYERS], ids=["forward", "layers"])
def test_layers_that_an_encode_calls_are_their_models(written, text):
    found = profiled(written(text))
    assert [row["site"] for row in found.advice] == ["one", "two"]
    assert {p for g in found.groups for p in g.paths} >= {"one.lin_l", "two.lin_l"}


def test_an_odd_step_is_no_sample(written):
    """What most steps run is profiled, although the first one that is traced runs more."""
    assert not [g for g in profiled(written(ODD), 60).groups if g.name == "aten::cumsum"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile itself reads it
def test_a_compiled_model_says_so(written):
    found = profiled(written(COMPILED))
    assert found.remarks == [scripts.COMPILED]
    assert {row["reason"] for row in found.advice} == {scripts.IN_COMPILE}
    assert {row["advice"] for row in found.advice} == {"nothing to gain"}


def command(script: str, *words: str, machine: str):
    return CliRunner().invoke(cli.app, ["profile", script, *words, "--machine", machine, "--repeats", "2"])


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        ("RuntimeError('no data left')", "RuntimeError: no data left", 1),
        ("SystemExit(3)", "SystemExit: 3", 3),
        ("KeyboardInterrupt", "KeyboardInterrupt", 130),
    ],
    ids=["raised", "exit", "interrupted"],
)
def test_what_was_seen_of_a_script_that_fails_is_kept(written, tmp_path, paced, error, said, code):
    script, kept = written(FAILS.replace("{}", error)), tmp_path / "p.json"
    Machine().save(tmp_path / "machine.json")
    words = ["--apply", "--json", str(kept), "--html", str(tmp_path / "p.html")]
    result = command(script, "7", *words, machine=str(tmp_path / "machine.json"))
    assert result.exit_code == code
    found = json.loads(kept.read_text())
    assert found["groups"]
    assert found["remarks"] == [f"the script ended with {said} after 7 optimizer steps: this was seen until then"]
    assert (tmp_path / "p.html").stat().st_size
    assert found["applied"].get("applied", False) is False
    kept.unlink()
    assert command(script, "2", *words, machine=str(tmp_path / "machine.json")).exit_code == code
    assert not kept.exists()  # nothing had been seen


def test_a_stage_that_is_interrupted_loses_nothing(written, tmp_path, paced, monkeypatch):
    from stretto.cli import profile as stages

    def interrupted(out, result):
        raise KeyboardInterrupt

    monkeypatch.setattr(stages, "show_replay", interrupted)
    Machine().save(tmp_path / "machine.json")
    script, written_to = written(ENCODE), tmp_path / "p.json"
    words = ["60", "--replay", "--share", "1.0", "--json", str(written_to)]
    result = command(script, *words, machine=str(tmp_path / "machine.json"))
    assert result.exit_code == 130
    assert json.loads(written_to.read_text())["replays"]


def test_a_place_that_cannot_be_written_to_is_refused_at_once(written, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    result = CliRunner().invoke(cli.app, ["profile", written(ENCODE), "--html", str(tmp_path / "p.html")])
    assert "cannot be written to" in str(result.exception)


def test_a_closure_is_the_forward_pass(written):
    """LBFGS calls the model from within its step."""
    found = profiled(written(CLOSURE))
    phases = {g.phase for g in found.groups if g.name == "aten::addmm"}
    assert phases == {"forward"}
    assert {g.phase for g in found.groups} == {"forward", "backward", "optimizer"}


def test_calls_of_a_closure_are_those_of_the_steps_that_were_timed(written, paced):
    """LBFGS may call it more often at first."""
    fewer = "for i in range(int(sys.argv[1])):\n    optimizer.param_groups[0]['max_iter'] = 4 if i < 4 else 2\n"
    text = CLOSURE.replace("for _ in range(int(sys.argv[1])):\n", fewer)
    assert fewer in text
    assert calls(profiled(written(text))) == calls(profiled(written(CLOSURE))) == {"one": (2, 0), "two": (2, 0)}


def test_a_history_that_grows_is_told(written):
    text = CLOSURE.replace("history_size=2", "history_size=1000")
    with pytest.raises(StrettoError, match="LBFGS has more to do with each step until its history is full"):
        profiled(written(text), 100)


def test_gradients_are_clipped_for_the_update(written):
    """After the backward pass and before the optimizer is no forward pass."""
    phases = {g.phase for g in profiled(written(CLIPS)).groups if "norm" in g.name}
    assert phases == {"optimizer"}


def test_models_may_be_copied_and_saved_while_they_are_watched(written):
    found = profiled(written(KEEPS))
    assert [row["site"] for row in found.advice] == ["Net.one", "Net.two"]
