"""On a GPU: torch.cuda.graph captures a whole training step on a fixed graph, and replays do what steps do."""

import importlib

import pytest
import torch
import torch_geometric

import stretto
from stretto import Graph, ops
from tests.gpu.inputs import edges, no_batch_is_passed_by  # noqa: F401 -- a fixture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


def captured_like_eager(module: torch.nn.Module, loss_of) -> None:
    """Steps of SGD on loss_of(): three replays of a captured one leave what three eager ones do."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss.detach()

    captured, loss = capture(step)
    start = {k: v.clone() for k, v in module.state_dict().items()}
    for _ in range(3):
        captured.replay()
    replayed, weights = loss.clone(), {k: v.clone() for k, v in module.state_dict().items()}
    module.load_state_dict(start)
    for _ in range(3):
        eager = step()
    torch.testing.assert_close(replayed, eager)
    torch.testing.assert_close(weights, dict(module.state_dict()))


def capture(step) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """step(), captured after a few calls in which the tuner decides; and its result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(5):
            step()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        result = step()
    return captured, result


def test_a_training_step_can_be_captured():
    graph = Graph.of(edges(800, 20_000, hub=3000).cuda(), 800)
    x = torch.randn(800, 32, device=CUDA)
    layer = torch.nn.Linear(32, 16).cuda()
    captured_like_eager(layer, lambda: ops.spmm(graph, layer(x), reduce="mean").pow(2).mean())


@pytest.mark.parametrize("name", ["gcn", "sage", "gin", "gat", "gatv2"])
def test_an_accelerated_training_step_can_be_captured(name):
    gpu = importlib.import_module("benchmarks.suites.gpu")
    edge_index = edges(900, 20_000, hub=3000).cuda()
    x, y = torch.randn(900, 32, device=CUDA), torch.randint(0, 7, (900,), device=CUDA)
    net = stretto.accelerate(gpu.Net(name, (32, 64, 7)).cuda())
    captured_like_eager(net, lambda: torch.nn.functional.cross_entropy(net(x, edge_index), y))


def test_every_replay_of_a_captured_step_drops_other_weights():
    edge_index = edges(300, 4000).cuda()
    x = torch.randn(300, 16, device=CUDA, requires_grad=True)
    layer = stretto.accelerate(torch_geometric.nn.GATConv(16, 8, heads=2, dropout=0.5).cuda())

    def step() -> torch.Tensor:
        out = layer(x, edge_index)
        return torch.cat([out.detach().view(-1), torch.autograd.grad(out.sum(), x)[0].view(-1)])

    captured, result = capture(step)
    seen = []
    for _ in range(3):
        captured.replay()
        seen.append(result.clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    torch.manual_seed(5)
    captured.replay()
    first = result.clone()
    torch.manual_seed(5)
    captured.replay()
    assert torch.equal(first, result)
