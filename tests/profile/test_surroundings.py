"""What a step or a script sets around its models: kept for their calls, and put back for all else."""

import multiprocessing
import os

import pytest
import torch
from torch_geometric.nn import SAGEConv
from typer.testing import CliRunner

from stretto import cli
from stretto.analyze import Machine
from stretto.profile import profile
from stretto.profile.script import alone, apply_script, profile_script
from stretto.profile.surroundings import Surroundings

TRAIN = """
import torch
from torch_geometric.nn import HGTConv, SAGEConv
torch.manual_seed(0)
x, edge_index, y = torch.randn(40, 8), torch.randint(40, (2, 160)), torch.randint(3, (40,))
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = SAGEConv(8, 8), SAGEConv(8, 3)
    def forward(self, x, edge_index):
        return self.two(self.one(x, edge_index).relu(), edge_index)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
for _ in range(70):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(net(x, edge_index), y).backward()
    optimizer.step()
"""
AUTOCAST = TRAIN.replace(
    "    torch.nn.f",
    "    with torch.autocast('cpu', dtype=torch.bfloat16):\n        out = net(x, edge_index)\n    torch.nn.f",
)
AUTOCAST = AUTOCAST.replace("cross_entropy(net(x, edge_index), y)", "cross_entropy(out, y)")
SETS = """
import multiprocessing, os, tempfile
import torch
assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
assert not torch.are_deterministic_algorithms_enabled()
torch.set_default_dtype(torch.float64)
torch.use_deterministic_algorithms(True, warn_only=True)
torch.set_grad_enabled(False)
multiprocessing.set_start_method("fork")
os.chdir(tempfile.mkdtemp())
from torch_geometric.nn import SAGEConv
x, edge_index = torch.randn(40, 8), torch.randint(40, (2, 160))
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = SAGEConv(8, 3)
    def forward(self, x, edge_index):
        return self.one(x @ torch.eye(8), edge_index)
net = Net().eval()
for _ in range(70):
    net(x, edge_index)
"""
HALF = TRAIN.index("for _")
MADE = TRAIN[:HALF] + "used = []\n"
TAKES_IT = "from made import *\nassert not used\nused.append(1)\n" + TRAIN[HALF:]
ONCE = "import pathlib\npathlib.Path(__file__).with_name('made').mkdir()\n" + TRAIN
ALONE = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
GROUPED = ALONE + TRAIN.replace("net = Net()", "net = torch.nn.parallel.DistributedDataParallel(Net())")


def profiled(script: str):
    return profile_script(script, [], Machine(), repeats=2, budget=2.0)


def test_a_model_under_autocast_is_called_again_under_it(written, paced):
    script = written(AUTOCAST)
    found = profiled(script)
    assert {row["site"] for row in found.advice if row["advice"] == "accelerate"} == {"one", "two"}
    types = {g.dtypes for g in alone(found, repeats=2).groups if g.name == "aten::addmm"}
    assert types == {"bfloat16, bfloat16, bfloat16"}
    assert apply_script(found, script, [])["error"] < 4e-2
    assert not torch.is_autocast_enabled("cpu")


def test_a_step_of_ones_own_under_autocast():
    torch.manual_seed(0)
    model, data = torch.nn.Sequential(torch.nn.Linear(8, 8), SAGEConv(8, 3)), torch.randn(40, 8)
    edge_index = torch.randint(40, (2, 160))

    def step(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model[1](model[0](x), edge_index).float().sum()

    advice = profile(model, data, step=step, repeats=1, machine=Machine()).recommend(repeats=2)
    assert [row["site"] for row in advice] == ["1"]


@pytest.fixture
def no_start_method():
    """As a process begins; other tests of this one may have chosen how to start processes."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(None, force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


def test_what_a_script_sets_is_put_back(written, paced, no_start_method):
    script = written(SETS)
    before = Surroundings.now(), torch.is_grad_enabled(), os.getcwd(), multiprocessing.get_start_method(allow_none=True)
    found = profiled(script)
    after = Surroundings.now(), torch.is_grad_enabled(), os.getcwd(), multiprocessing.get_start_method(allow_none=True)
    assert after == before
    part = alone(found, repeats=2)  # its float64 of torch.eye among them
    assert {g.dtypes for g in part.groups if g.name == "aten::mm"} == {"float64, float64"}
    assert part.replay(repeats=1)
    assert apply_script(found, script, [])["stock"]["repeats"] >= 3  # it finds what it found the first time
    assert Surroundings.now() == before[0]


def test_what_a_module_beside_the_script_has_made_is_made_again(written, paced, tmp_path):
    (tmp_path / "made.py").write_text(MADE)
    script = written(TAKES_IT)
    found = profiled(script)
    done = apply_script(found, script, [])
    assert done["error"] < 1e-4
    assert done["stock"]["repeats"] >= 3


def test_a_second_run_that_fails_says_so(written, paced, tmp_path):
    Machine().save(tmp_path / "machine.json")
    words = ["--apply", "--repeats", "2", "--machine", str(tmp_path / "machine.json")]
    result = CliRunner().invoke(cli.app, ["profile", written(ONCE), *words])
    assert "not applied: run again, the script ended with FileExistsError" in " ".join(result.output.split())
    assert isinstance(result.exception, FileExistsError)


ANOMALIES = TRAIN.replace("torch.manual_seed(0)", "torch.manual_seed(0)\ntorch.autograd.set_detect_anomaly(True)")


def test_anomaly_detection_is_told_and_put_back(written, paced):
    found = profiled(written(ANOMALIES))
    assert not torch.is_anomaly_enabled()
    (said,) = [remark for remark in found.remarks if "anomaly detection" in remark]
    checks = sum(op.name == "aten::isnan" for op in found.trace)
    assert f"on: {3 * checks} of {len(found.trace.ops)} ops" in said
    assert found.trace.unknown == []
    assert not any("anomaly" in remark for remark in profiled(written(TRAIN)).remarks)


def test_anomaly_detection_of_ones_own_stays():
    model, data = SAGEConv(8, 3), (torch.randn(40, 8), torch.randint(40, (2, 160)))
    with torch.autograd.detect_anomaly():
        (said,) = profile(model, data, repeats=1, machine=Machine()).remarks
        assert torch.is_anomaly_enabled()
    assert said.startswith("anomaly detection of torch.autograd is on")


@pytest.mark.parametrize("on", [True, False])
def test_surroundings_are_set_and_put_back(on):
    with torch.autocast("cpu", dtype=torch.float16, enabled=on):
        known = Surroundings.now()
    before = Surroundings.now()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not on):
        inside = Surroundings.now()
        with known.again():
            assert Surroundings.now() == known
        assert Surroundings.now() == inside
    assert Surroundings.now() == before


def test_a_script_may_make_its_process_group_twice(written, paced):
    script = written(GROUPED)
    found = profiled(script)
    try:
        assert apply_script(found, script, [])["stock"]["repeats"] >= 3
    finally:
        torch.distributed.destroy_process_group()
