"""profile and analyze of a model on a card: the card's own ceilings, every candidate there, ops waited for."""

import pytest
import torch

import stretto
from stretto.datasets import load_graph
from stretto.observe import this_machine
from stretto.observe.models import as_data, make
from stretto.observe.subject import subject
from stretto.profile.script import profile_script
from tests.gpu.inputs import no_batch_is_passed_by  # noqa: F401 -- a fixture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SCRIPT = """
import torch
from torch_geometric.nn import GCNConv
torch.manual_seed(0)
x, edges = torch.randn(500, 16, device="cuda"), torch.randint(500, (2, 3000), device="cuda")
conv = GCNConv(16, 4).cuda()
optimizer = torch.optim.Adam(conv.parameters())
for _ in range(40):
    optimizer.zero_grad()
    conv(x, edges).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def card(cache, monkeypatch):
    """Measured by the first test that asks, kept for the others."""
    monkeypatch.setenv("STRETTO_CACHE", str(cache))
    return this_machine.get(device="cuda")


def test_the_card_is_measured(card):
    assert (card.device, card.name) == ("cuda", torch.cuda.get_device_name())
    assert card.memory > 1e9
    assert set(card.peak_gemm) == {"float32", "float64", "bfloat16", "float16"}
    assert all(rate > 0 for *_, rate in (*card.peak_stream, *card.peak_gather, *card.gather, *card.spmm))
    assert this_machine.get(device="cuda") == card
    assert this_machine.get(device="cpu").device == "cpu"


@pytest.mark.parametrize("name", ["gcn", "gat"])
@pytest.mark.parametrize("fast", [False, True])
def test_a_model_on_a_card(card, name, fast):
    data = as_data(load_graph("rmat:10:8000"), width=32).to("cuda")
    model = make(name, 32, 16, 8).cuda()
    found = stretto.profile(stretto.accelerate(model) if fast else model, data, repeats=3)
    assert found.machine == card
    assert found.trace.attributed >= 0.9  # of 3 ms, autograd's thread takes up to 0.3 to end, which is no op's
    assert {g.bound for g in found.groups} <= {"launch", "bandwidth", "gather latency", "compute"}
    rows = found.replay()
    assert len(rows) == len(found.hot())
    assert all(row["ratio"] > 0 for row in rows)
    advice = found.recommend()
    assert all(row["in_step"] for row in advice if "stock_ms" in row)  # alone, a layer is mostly its host code
    assert found.apply()["reason"]


def test_analysis_of_a_model_on_a_card(card):
    model, data = subject("gcn", "rmat:10:8000", 16, 2, "cuda")
    report = stretto.analyze(model, data, procs=[1, 2])
    assert report.machine == card
    assert report.seconds > 0
    rows = {row["what"]: row for row in report.validate(workers=0)}
    assert rows["flops"]["ratio"] == 1
    assert rows["step, as given"]["measured"] > 0


def test_a_script_on_a_card(card, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    found = profile_script(str(path), [], "auto", repeats=3)
    assert found.machine == card
    assert found.trace.step_seconds > 0
