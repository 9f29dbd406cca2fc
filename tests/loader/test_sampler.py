"""The native sampler: every edge exists, counts are right, nothing repeats, draws are uniform, all is reproducible."""

import pytest
import torch
from scipy import stats

from stretto.errors import StrettoError
from stretto.kernels import native
from stretto.loader.native_sampler import NativeSampler, NodeType, Relation, Sampling, Slice, running_weights
from tests.loader.graphs import AWKWARD, awkward, csc, same, sampler, take

FANOUTS = ([3], [5, 3], [2, 2, 2], [-1, 4], [40, 40])


@pytest.mark.parametrize("fanout", FANOUTS, ids=str)
@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_edges_exist_and_counts_are_right(name, fanout, index):
    edge_index, n = awkward(name)
    seeds = torch.arange(0, n, max(1, n // 7))
    slot = take(sampler(edge_index, n, fanout, Sampling.EDGE_ID | Sampling.CSR, index=index), seeds)
    n_id, local, e_id = slot.n_id(), slot.edge_index(), slot.edge_id()
    assert torch.equal(n_id[: len(seeds)], seeds)
    assert torch.equal(n_id[local], edge_index[:, e_id])  # relabelled ends are the ends of that very edge
    assert n_id.unique().numel() == n_id.numel()
    assert e_id.unique().numel() == e_id.numel()  # frontier semantics: each target is sampled once, without repeats
    assert sum(slot.nodes_per_hop()) == n_id.numel()
    assert sum(slot.edges_per_hop()) == e_id.numel()

    degree = torch.bincount(edge_index[1], minlength=n)
    got = torch.bincount(local[1], minlength=n_id.numel())
    start = 0
    for hop, k in enumerate(fanout):
        stop = start + slot.nodes_per_hop()[hop]
        wanted = degree[n_id[start:stop]]
        wanted = wanted if k < 0 else wanted.clamp(max=k)
        assert torch.equal(got[start:stop], wanted)
        start = stop
    assert not got[start:].any()  # nodes of the last hop are not expanded

    assert (local[1].diff() >= 0).all()  # grouped by target, hop after hop
    assert torch.equal(slot.rowptr(), torch.cat([torch.zeros(1, dtype=torch.int64), got.cumsum(0)]))
    assert torch.equal(slot.col().long(), local[0])


@pytest.mark.parametrize("fanout", [[1], [2, 1], [5, 10, 15], [16, 17], [31, 32, 33]], ids=str)
def test_targets_that_draw_together_draw_what_each_draws_alone(fanout):
    """Vector registers only save time: blocks that are not full, targets with few neighbours and hubs included."""
    generator = torch.Generator().manual_seed(3)
    n, hub = 400, torch.arange(400)
    edge_index = torch.cat([torch.randint(0, n, (2, 12_000), generator=generator), torch.stack([hub, hub * 0])], 1)
    seeds, before, slots = torch.arange(0, n, 3), native.isa(), {}
    if len(native.isas()) < 2:
        pytest.skip("this processor has no vector registers long enough")
    try:
        for isa in native.isas():
            native.set_isa(isa)
            one = sampler(edge_index, n, fanout)
            slots[isa] = [take(one, seeds[: 1 + 5 * batch], batch=batch) for batch in range(20)]
    finally:
        native.set_isa(before)
    for isa in native.isas():
        assert all(same(a, b) for a, b in zip(slots[isa], slots["baseline"], strict=True)), isa


@pytest.mark.parametrize("name", AWKWARD)
def test_layered_semantics_samples_all_known_nodes_at_every_hop(name):
    edge_index, n = awkward(name)
    fanout = [3, 2, 4]
    slot = take(
        sampler(edge_index, n, fanout, Sampling.EDGE_ID | Sampling.LAYERED), torch.tensor([0, n - 1][: min(n, 2)])
    )
    degree = torch.bincount(edge_index[1], minlength=n)
    assert torch.equal(slot.n_id()[slot.edge_index()], edge_index[:, slot.edge_id()])
    known, start = slot.nodes_per_hop()[0], 0
    for hop, k in enumerate(fanout):
        stop = start + slot.edges_per_hop()[hop]
        got = torch.bincount(slot.edge_index()[1, start:stop], minlength=known)
        assert torch.equal(got, degree[slot.n_id()[:known]].clamp(max=k))
        e_id = slot.edge_id()[start:stop]
        assert e_id.unique().numel() == e_id.numel()
        known, start = known + slot.nodes_per_hop()[hop + 1], stop


@pytest.mark.parametrize("name", AWKWARD)
def test_replacement_draws_exactly_the_fanout(name):
    edge_index, n = awkward(name)
    slot = take(sampler(edge_index, n, [6], Sampling.EDGE_ID | Sampling.REPLACE), torch.arange(n))
    degree = torch.bincount(edge_index[1], minlength=n)
    got = torch.bincount(slot.edge_index()[1], minlength=n)
    assert torch.equal(got, torch.where(degree > 0, 6, 0))
    assert torch.equal(slot.n_id()[slot.edge_index()], edge_index[:, slot.edge_id()])


@pytest.mark.parametrize("name", AWKWARD)
def test_disjoint_trees_never_meet(name):
    edge_index, n = awkward(name)
    seeds = torch.tensor([0, 0, n - 1])
    slot = take(sampler(edge_index, n, [4, 3], Sampling.EDGE_ID | Sampling.DISJOINT), seeds)
    tree, local = slot.tree(), slot.edge_index()
    assert torch.equal(tree[:3], torch.arange(3))
    assert torch.equal(tree[local[0]], tree[local[1]])
    assert torch.equal(slot.n_id()[local], edge_index[:, slot.edge_id()])
    pairs = torch.stack([slot.n_id(), tree])
    assert pairs.unique(dim=1).size(1) == pairs.size(1)


def test_induced_holds_every_edge_between_the_sampled_nodes():
    edge_index, n = awkward("random")
    slot = take(sampler(edge_index, n, [3, 3], Sampling.EDGE_ID | Sampling.INDUCED | Sampling.CSR), torch.arange(5))
    inside = torch.zeros(n, dtype=torch.bool)
    inside[slot.n_id()] = True
    wanted = (inside[edge_index[0]] & inside[edge_index[1]]).nonzero().view(-1)
    assert torch.equal(slot.edge_id().sort().values, wanted)
    assert torch.equal(slot.n_id()[slot.edge_index()], edge_index[:, slot.edge_id()])


# The last four: marks told apart exactly, marks that may be another's, the bitmap, the first that is not exact
# (csrc/sampler/pick.h).
UNIFORM = [
    (6, 5),
    (100, 5),
    (2, 1),
    (40000, 15),
    (100, 50),
    (300, 290),
    (1024, 40),
    (1500, 30),
    (3000, 200),
    (1025, 32),
]


@pytest.mark.parametrize(("n", "k"), UNIFORM)
def test_uniform_over_a_million_draws(n, k):
    """Chi-square of how often each neighbour is taken, and none twice; 16-bit modulo sampling fails at (40000, 15)."""
    draws = 1_000_000 if n < 40000 else 4_000_000
    times = draws // k
    row = torch.arange(1, n + 1, dtype=torch.int32)
    colptr = torch.cat([torch.tensor([0, n]), torch.full((n,), n)])
    native = NativeSampler([NodeType(n + 1)], [Relation(colptr, row, [k])], 1, Sampling.EDGE_ID | Sampling.DISJOINT)
    counts = torch.zeros(n, dtype=torch.int64)
    chunk = 20_000
    for batch in range(times // chunk + 1):
        slot = take(native, torch.zeros(min(chunk, times), dtype=torch.int64), seed=3, batch=batch)
        counts += torch.bincount(slot.edge_id(), minlength=n)
        assert bool((slot.edge_id().view(-1, k).sort(dim=1).values.diff(dim=1) > 0).all())
    total = int(counts.sum())
    expected = total / n
    # Draws without replacement vary less than independent ones, by (n - k) / (n - 1).
    statistic = float(((counts.double() - expected) ** 2 / expected).sum()) / ((n - k) / (n - 1))
    assert 1e-4 < stats.chi2.sf(statistic, n - 1) < 1 - 1e-4


def test_pairs_are_uniform_too():
    """All 2-subsets of 6 neighbours are equally likely, not only each neighbour."""
    row = torch.arange(1, 7, dtype=torch.int32)
    colptr = torch.tensor([0, 6, 6, 6, 6, 6, 6, 6])
    native = NativeSampler([NodeType(7)], [Relation(colptr, row, [2])], 1, Sampling.EDGE_ID | Sampling.DISJOINT)
    pairs = take(native, torch.zeros(300_000, dtype=torch.int64)).edge_id().view(-1, 2).sort(dim=1).values
    counts = torch.bincount(pairs[:, 0] * 6 + pairs[:, 1], minlength=36)
    counts = counts[counts > 0].double()
    assert counts.numel() == 15
    assert stats.chisquare(counts.numpy()).pvalue > 1e-4


@pytest.mark.parametrize("replace", [False, True])
def test_weighted_draws_follow_the_weights(replace):
    weight = torch.tensor([1.0, 0.0, 2.0, 5.0, 0.5])
    colptr = torch.tensor([0, 5, 5, 5, 5, 5, 5])
    relation = Relation(colptr, torch.arange(1, 6, dtype=torch.int32), [2], running=running_weights(colptr, weight))
    flags = Sampling.EDGE_ID | Sampling.DISJOINT | (Sampling.REPLACE if replace else Sampling(0))
    native = NativeSampler([NodeType(6)], [relation], 1, flags)
    pairs = take(native, torch.zeros(200_000, dtype=torch.int64)).edge_id().view(-1, 2)
    p = (weight / weight.sum()).double()
    if replace:
        expected = p * 2
    else:  # successive sampling: first by weight, second by weight among the rest
        expected = p + torch.stack([sum(p[j] * p[i] / (1 - p[j]) for j in range(5) if j != i) for i in range(5)])
        assert (pairs[:, 0] != pairs[:, 1]).all()
    counts = torch.bincount(pairs.reshape(-1), minlength=5).double() / 200_000
    assert counts[1] == 0
    assert torch.allclose(counts, expected, atol=0.006)


def test_weighted_takes_what_is_there():
    colptr = torch.tensor([0, 4, 4, 4, 4, 4])
    running = running_weights(colptr, torch.tensor([0.0, 3.0, 1e-9, 1e9]))
    native = NativeSampler(
        [NodeType(5)],
        [Relation(colptr, torch.arange(1, 5, dtype=torch.int32), [3], running=running)],
        1,
        Sampling.EDGE_ID,
    )
    assert sorted(take(native, torch.tensor([0])).edge_id().tolist()) == [1, 2, 3]


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_bad_weights_are_refused(bad):
    with pytest.raises(StrettoError, match="weight"):
        running_weights(torch.tensor([0, 2]), torch.tensor([1.0, bad]))


def test_last_takes_the_latest_not_after_the_seed():
    time = torch.tensor([1, 2, 3, 3, 5, 9])
    colptr = torch.tensor([0, 6, 6, 6, 6, 6, 6, 6])
    relation = Relation(colptr, torch.arange(1, 7, dtype=torch.int32), [2], time=time)
    native = NativeSampler([NodeType(7)], [relation], 1, Sampling.EDGE_ID | Sampling.DISJOINT | Sampling.LAST)
    slot = native.sample(0, 0, 0, [torch.zeros(4, dtype=torch.int64)], [torch.tensor([4, 0, 1, 100])])
    trees = [slot.edge_id()[slot.edge_index()[1] == i].tolist() for i in range(4)]
    assert trees == [[2, 3], [], [0], [4, 5]]


def test_no_edge_is_later_than_its_seed():
    edge_index, n = awkward("random")
    generator = torch.Generator().manual_seed(1)
    time = torch.randint(0, 50, (edge_index.size(1),), generator=generator)
    order = torch.argsort(edge_index[1] * 100 + time, stable=True)
    colptr, _, _ = csc(edge_index, n)
    relation = Relation(colptr, edge_index[0][order].int(), [4, 4], edge_id=order, time=time[order])
    native = NativeSampler([NodeType(n)], [relation], 2, Sampling.EDGE_ID | Sampling.DISJOINT)
    seed_time = torch.arange(0, 60, 3)
    slot = native.sample(0, 0, 0, [torch.arange(20)], [seed_time])
    assert (time[slot.edge_id()] <= seed_time[slot.tree()[slot.edge_index()[1]]]).all()
    valid = torch.bincount(edge_index[1][(time <= 57)], minlength=n)
    assert slot.num_edges() > 0
    assert int((slot.edge_index()[1] == 19).sum()) == min(4, int(valid[19]))


def test_labor_shares_sources_and_keeps_the_counts():
    edge_index, n = awkward("random")
    seeds = torch.arange(100)
    plain = take(sampler(edge_index, n, [5]), seeds)
    labor = take(sampler(edge_index, n, [5], Sampling.EDGE_ID | Sampling.LABOR), seeds)
    count = torch.bincount(plain.edge_index()[1], minlength=100)
    assert torch.equal(torch.bincount(labor.edge_index()[1], minlength=100), count)
    assert labor.num_nodes() < plain.num_nodes()
    assert labor.edge_id().unique().numel() == labor.num_edges()


def test_labor_is_uniform_for_each_target():
    n = 30
    row = torch.arange(1, n + 1, dtype=torch.int32)
    colptr = torch.cat([torch.tensor([0, n]), torch.full((n,), n)])
    native = NativeSampler([NodeType(n + 1)], [Relation(colptr, row, [4])], 1, Sampling.EDGE_ID | Sampling.LABOR)
    counts = torch.zeros(n)
    for batch in range(20_000):
        counts += torch.bincount(take(native, torch.tensor([0]), batch=batch).edge_id(), minlength=n)
    expected = counts.sum() / n
    assert stats.chi2.sf(float(((counts - expected) ** 2 / expected).sum()) / ((n - 4) / (n - 1)), n - 1) > 1e-4


def test_duplicate_seeds_keep_their_places():
    edge_index, n = awkward("random")
    seeds = torch.tensor([3, 7, 3, 3, 9, 7])
    x = torch.arange(n).float().view(-1, 1)
    slot = take(sampler(edge_index, n, [4, 4], slices=[Slice(x)]), seeds)
    assert torch.equal(slot.n_id()[:6], seeds)
    assert torch.equal(slot.slice(0).view(-1).long(), slot.n_id())
    assert torch.equal(slot.n_id()[slot.edge_index()], edge_index[:, slot.edge_id()])
    degree = torch.bincount(edge_index[1], minlength=n).clamp(max=4)
    got = torch.bincount(slot.edge_index()[1], minlength=slot.num_nodes())
    assert torch.equal(got[:6], degree[seeds])  # every copy of a seed has its own edges


def test_same_key_same_batch_and_every_part_of_the_key_matters():
    edge_index, n = awkward("random")
    native = sampler(edge_index, n, [3, 3])
    seeds = torch.arange(10)
    first = take(native, seeds, seed=1, epoch=2, batch=3)
    assert same(first, take(native, seeds, seed=1, epoch=2, batch=3))
    assert same(first, take(sampler(edge_index, n, [3, 3]), seeds, seed=1, epoch=2, batch=3))
    for change in ({"seed": 9}, {"epoch": 9}, {"batch": 9}):
        assert not same(first, take(native, seeds, **{"seed": 1, "epoch": 2, "batch": 3, **change}))


def test_bad_input_is_an_error_and_the_sampler_survives():
    edge_index, n = awkward("random")
    native = sampler(edge_index, n, [3, 3])
    good = take(native, torch.arange(10))
    for bad in (-1, n, 2**40):
        with pytest.raises(StrettoError, match=f"seed {bad} is not a node"):
            take(native, torch.tensor([0, bad]))
    assert same(good, take(native, torch.arange(10)))
    colptr, row, _ = csc(edge_index, n)
    with pytest.raises(StrettoError, match="comes from node 200"):
        NativeSampler([NodeType(n)], [Relation(colptr, row + (row == row.max()).int(), [2])], 1, Sampling(0))
    down = colptr.clone()
    down[1] = down[-1]  # the ends are right
    with pytest.raises(StrettoError, match="colptr decreases"):
        NativeSampler([NodeType(n)], [Relation(down, row, [2])], 1, Sampling(0))
    with pytest.raises(StrettoError, match="hops"):
        NativeSampler([NodeType(n)], [Relation(colptr, row, [2, 2])], 1, Sampling(0))


def test_int8_rows_arrive_scaled():
    edge_index, n = awkward("random")
    values = torch.randint(-127, 128, (n, 70), dtype=torch.int8)
    scale = torch.rand(70)
    slot = take(sampler(edge_index, n, [3], slices=[Slice(values, scale=scale)]), torch.arange(20))
    assert torch.equal(slot.slice(0), values[slot.n_id()].float() * scale)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (16,), (100,), (5, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_rows_are_gathered_for_any_shape_and_type(shape, dtype):
    edge_index, n = awkward("random")
    x = torch.randint(0, 100, (n, *shape)).to(dtype)
    weight = torch.randint(0, 100, (edge_index.size(1), *shape)).to(dtype)
    slot = take(sampler(edge_index, n, [4, 4], slices=[Slice(x), Slice(weight, of_edges=True)]), torch.arange(50))
    assert torch.equal(slot.slice(0), x[slot.n_id()])
    assert torch.equal(slot.slice(1), weight[slot.edge_id()])


def test_hash_tables_grow_and_agree_with_the_direct_table():
    """Disjoint sampling of one seed visits the same neighbourhood structure as the direct table would allow."""
    edge_index, n = awkward("random")
    slot = take(sampler(edge_index, n, [-1, -1, -1], Sampling.EDGE_ID | Sampling.DISJOINT), torch.arange(100))
    plain = [take(sampler(edge_index, n, [-1, -1, -1]), torch.tensor([i])) for i in range(3)]
    for i, alone in enumerate(plain):
        mine = slot.tree() == i
        assert set(slot.n_id()[mine].tolist()) == set(alone.n_id().tolist())
        assert int(mine[slot.edge_index()[1]].sum()) == alone.num_edges()
