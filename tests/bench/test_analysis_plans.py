"""The plans of one step beside one another: each runs what it says, and ranks are compared pair by pair."""

import pytest
import torch

import stretto
from stretto import datasets
from stretto.analyze.models import as_data, make
from stretto.analyze.validate import plans
from stretto.analyze.workload import Workload
from stretto.bench import analysis_plans
from stretto.bench.analysis_plans import order, other_plans, tau
from stretto.compile.choose import MOST_STEPS


def settled(model):
    torch.manual_seed(0)
    data = as_data(datasets.load_graph("er:300:2000"), width=24)
    net = make(model, 24, 16, int(data.y.max()) + 1)
    fast = plans(Workload(net, data))["accelerated"]
    for _ in range(MOST_STEPS):
        fast.run()
    return fast


def gradients(workload):
    """What a step leaves in every parameter."""
    torch.manual_seed(0)
    workload.run()
    return {name: parameter.grad.clone() for name, parameter in workload.model.named_parameters()}


@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "gat", "tag"])
def test_each_plan_runs_other_ops_to_the_same_result(model):
    fast = settled(model)
    usual = analysis_plans._ops(fast)
    found = other_plans(fast)
    assert found
    for name, step in found.items():
        assert step.plan.name in name
        assert analysis_plans._ops(step) != usual
        torch.testing.assert_close(gradients(step), gradients(fast), rtol=1e-4, atol=1e-4)
    assert analysis_plans._ops(fast) == usual  # what was chosen is chosen still


def test_a_layer_with_one_order_has_no_other_plan():
    assert other_plans(settled("sgc")) == {}


def test_explain_and_report_tell_the_chosen_plan_afterwards():
    fast = settled("gat")
    before = [row.plan for row in stretto.report(fast.model).rows]
    other_plans(fast)
    fast.run()
    assert [row.plan for row in stretto.report(fast.model).rows] == before


def rows(*pairs):
    return [{"predicted": p, "measured": m} for p, m in pairs]


@pytest.mark.parametrize(
    ("given", "counts", "value"),
    [
        (rows((1, 1), (2, 2), (3, 3)), (3, 0), 1.0),
        (rows((1, 3), (2, 2), (3, 1)), (0, 3), -1.0),
        (rows((1, 1), (3, 2), (2, 3)), (2, 1), 1 / 3),
        (rows((2, 1.0), (1, 1.04), (3, 2)), (2, 0), 1.0),  # the first two are a tie
        (rows((2, 1.0), (2, 2.0)), (0, 1), -1.0),  # told as equal, and they are not
        (rows((1, 1.0), (2, 1.01)), (0, 0), None),
    ],
)
def test_order_by_hand(given, counts, value):
    assert order(given) == counts
    assert tau(given) == (pytest.approx(value) if value is not None else None)
