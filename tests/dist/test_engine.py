"""The engine against one process: synchronous to rounding, stale as Eq. 3 and 5 say, ages within their bounds."""

import copy

import pytest
import torch
import torch.nn.functional as F

from stretto import accelerate
from stretto.observe.models import make
from stretto.dist import SCHEDULES, Age, Staleness, launch, partition
from stretto.dist.run import gathered
from tests.dist.ranks import Case, run_cases, sample, sgd
from tests.dist.simulator import simulate
from tests.graphs import SMALL, random_edges

RANKS, WIDTH, CLASSES = 3, 8, 3
MODELS = ("gcn", "sage", "gin")
BOTH = ("remote", "remote_gradient")
# What is raised -> setting. The six numbers of the features and the four of the gradients, each alone, then together.
SETTINGS = {
    **{f"T of {slot}": Staleness(**{slot: Age(2, 1)}) for slot in Staleness().bounds},
    **{f"L of {slot}": Staleness(**{slot: Age(0, 2)}) for slot in Staleness().bounds},
    "PipeGCN": Staleness.halo(1),
    "all": Staleness(*[Age(steps, 1 + steps % 2) for steps in (1, 2, 3, 1, 2)]),
}


def three_layers(name, dtype=torch.float64):
    return make(name, WIDTH, WIDTH, CLASSES, 3).to(dtype)


def some_graph(dtype=torch.float64):
    loops = torch.arange(0, 40, 7)
    edges = torch.cat([random_edges(40, 38, 150, 3), torch.stack([loops, loops])], dim=1)  # 38, 39 receive nothing
    return sample(edges, 41, WIDTH, CLASSES, dtype)  # node 40 is isolated


def uneven_owner(n, parts=RANKS):
    """Parts of very different sizes in no order."""
    return (torch.rand(n, generator=torch.Generator().manual_seed(5)).square() * parts).long()


def zoo():
    """Sync cases on every small square graph; the last part has no training row, or no row at all."""
    for name, make_graph in SMALL.items():
        edges, (n, m) = make_graph()
        if n != m:
            continue
        data = sample(edges, n, WIDTH, CLASSES)
        owner = torch.arange(n) % RANKS
        data.train_mask = (owner != RANKS - 1) & (data.y >= 0)
        yield f"{name}, no training row", Case(three_layers("gcn"), data, owner, 2)
        yield f"{name}, empty part", Case(three_layers("sage"), data, torch.arange(n) % (RANKS - 1), 2)


def cases():
    data, narrow = some_graph(), some_graph(torch.float32)
    found = dict(zoo())
    for name in MODELS:
        owner = partition(data.edge_index, data.num_nodes, RANKS, "random")
        for schedule_name, schedule in SCHEDULES.items():
            found[f"{name}, {schedule_name}"] = Case(three_layers(name), data, owner, 3, {"schedule": schedule})
        found[f"{name}, accelerated"] = Case(accelerate(three_layers(name)), data, uneven_owner(41))
        found[f"{name}, fp32"] = Case(three_layers(name, torch.float32), narrow, uneven_owner(41))
        found[f"{name}, fp32, accelerated"] = Case(
            accelerate(three_layers(name, torch.float32)), narrow, uneven_owner(41)
        )
        found[f"{name}, newest"] = Case(
            three_layers(name), data, owner, 4, {"staleness": Staleness(remote=Age(2), newest=True)}
        )
        for setting_name, staleness in SETTINGS.items():
            # The schedule must not matter: they take turns.
            schedule = list(SCHEDULES.values())[len(found) % 4]
            options = {"staleness": staleness, "schedule": schedule}
            found[f"{name}, {setting_name}"] = Case(three_layers(name), data, uneven_owner(41), 5, options)
    for reduce in ("max", "sum"):
        model = three_layers("sage")
        for conv in model.convs:
            conv.aggr = reduce
            conv.aggr_module = type(conv)(1, 1, aggr=reduce).aggr_module
        found[f"sage {reduce}"] = Case(model, data, uneven_owner(41))
    return found


CASES = cases()


@pytest.fixture(scope="module")
def by_rank():
    """Every case in one set of three processes."""
    return launch(run_cases, RANKS, list(CASES.values()), limit=250)


@pytest.fixture(scope="module")
def ran(by_rank):
    """The same, put together over the ranks."""
    runs = zip(*by_rank, strict=True)
    return {n: gathered(list(r), c.data.num_nodes) for (n, c), r in zip(CASES.items(), runs, strict=True)}


def alone(case):
    """The same steps in this process."""
    model, data = copy.deepcopy(case.model), case.data
    optimizer, losses, gradients = sgd(model.parameters()), [], []
    mask = data.train_mask
    for _ in range(case.steps):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[mask], data.y[mask], reduction="sum") / max(1, int(mask.sum()))
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
        optimizer.step()
    with torch.no_grad():
        return losses, gradients, model(data.x, data.edge_index)


def close(found, wanted, allowed):
    return float((found - wanted).norm()) <= allowed * max(float(wanted.norm()), 1e-12)


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if "staleness" not in c.options])
def test_synchronous_equals_one_process(ran, name):
    case, run = CASES[name], ran[name]
    allowed = 1e-5 if "fp32" in name else 1e-10
    losses, gradients, out = alone(case)
    assert run.losses == pytest.approx(losses, rel=allowed, abs=1e-12)
    for found, wanted in zip(run.gradients, gradients, strict=True):
        assert close(found, wanted, allowed)
    assert close(run.predictions, out, 10 * allowed)
    assert all(reading.age == Age() for reading in run.ages)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("model", MODELS)
def test_stale_is_what_the_equations_say(ran, model, setting):
    case, run = CASES[f"{model}, {setting}"], ran[f"{model}, {setting}"]
    twin = copy.deepcopy(case.model)
    losses, gradients = simulate(twin, case.data, case.owner, SETTINGS[setting], case.steps, sgd(twin.parameters()))
    assert run.losses == pytest.approx(losses, rel=1e-10)
    for found, wanted in zip(run.gradients, gradients, strict=True):
        assert close(found, wanted, 1e-10)


@pytest.mark.parametrize("setting", SETTINGS)
def test_ages_reach_their_bounds_and_never_exceed_them(ran, setting):
    staleness = SETTINGS[setting]
    for model in MODELS:
        run = ran[f"{model}, {setting}"]
        for reading in run.ages:
            assert reading.age.within(staleness.bounds[reading.slot])
        for slot, (steps, layers) in run.oldest().items():
            assert (steps, layers) == (staleness.bounds[slot].steps, staleness.bounds[slot].layers)
        assert run.losses != pytest.approx(alone(CASES[f"{model}, {setting}"])[0], rel=1e-6), "nothing was stale"


def test_newest_rows_are_no_older_than_allowed(ran):
    for model in MODELS:
        assert all(reading.age.within(Age(2)) for reading in ran[f"{model}, newest"].ages)


def test_weights_stay_the_same_on_every_rank(by_rank):
    for found in zip(*by_rank, strict=True):
        for rank in found[1:]:
            for one, other in zip(found[0]["weights"].values(), rank["weights"].values(), strict=True):
                assert torch.equal(one, other)
