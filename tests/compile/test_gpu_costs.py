"""The cost model with a GPU's profile: launches count where work is small, and the order of GAT's sum."""

from dataclasses import replace

import pytest

from stretto.compile.cost import Work, gat_on_gpu
from stretto.compile.plan import Request, rank
from stretto.layers import gcn, gin
from stretto.machine.rates import TYPICAL, TYPICAL_GPU


def test_a_call_hides_behind_work_on_a_gpu_only():
    tiny, large = Work("gemm", 8, 1e3, 1e3), Work("gemm", 8, 1e13, 1e9)
    assert tiny.seconds(TYPICAL_GPU) == TYPICAL_GPU.call
    assert large.seconds(TYPICAL_GPU) == pytest.approx(1e13 / TYPICAL_GPU.gemm)
    assert tiny.seconds(TYPICAL) > TYPICAL.call
    assert Work("spmm", 8, 1e3, 1e3, 1e3, 32).seconds(TYPICAL_GPU) == TYPICAL_GPU.spmm_call


def test_a_small_graph_takes_the_plan_with_the_fewest_calls():
    sizes = {"n": 50, "m": 50, "E": 200, "i": 16, "o": 32}
    ranking = rank(Request(gin.OWN_ROOT), sizes, 4, TYPICAL_GPU)
    counts = {plan: len(plan.works(sizes)) for _, plan in ranking.predicted}
    assert counts[ranking.best] == min(counts.values())


@pytest.mark.parametrize(("i", "o", "first"), [(32, 256, "(A X) W'"), (256, 32, "A (X W')")])
def test_the_narrow_side_is_aggregated(i, o, first):
    sizes = {"n": 131_072, "m": 131_072, "E": 2_200_000, "i": i, "o": o}
    assert str(rank(Request(gcn.EXPRESSION), sizes, 4, TYPICAL_GPU).best.forward) == first


def sums_first(rates, **sizes):
    project_first, sum_first = gat_on_gpu(rates, **sizes)
    return sum_first < project_first


def test_gat_sums_first_only_where_inputs_are_narrow():
    graph = {"edges": 114_000_000, "rows": 2_100_000, "heads": 4, "width": 64}
    assert not sums_first(TYPICAL_GPU, i=100, **graph)
    assert not sums_first(TYPICAL_GPU, i=602, **graph)
    assert sums_first(TYPICAL_GPU, i=16, **graph)
    slow = replace(TYPICAL_GPU, gemm=TYPICAL_GPU.gemm / 1000)  # where GEMMs are dear, thin batches of them never pay
    assert not sums_first(slow, i=16, **graph)
