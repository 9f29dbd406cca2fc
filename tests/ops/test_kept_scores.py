"""Scores kept for backward: the same bits as computed again; kept where the tuner finds it pays and memory allows."""

import pytest
import torch

from stretto.ops import kept_scores
from stretto.ops.kept_scores import AGAIN, KEPT
from stretto.ops.pick import TRIES, WARM, picker
from tests.graphs import graph_of
from tests.ops.test_attention import call, inputs

pytestmark = pytest.mark.usefixtures("needs_native")


class Forced:
    """Stands in for the tuner."""

    def __init__(self, monkeypatch):
        self.variant, self.told, self.keys = AGAIN, [], []
        monkeypatch.setattr(kept_scores, "LEAST", 0)
        monkeypatch.setattr(picker, "offer", self._offer)
        monkeypatch.setattr(picker, "told", lambda key, variant, seconds: self.told.append((key, variant, seconds)))

    def _offer(self, key, variants):
        assert variants == (AGAIN, KEPT)
        self.keys.append(key)
        return self.variant, True


@pytest.fixture
def tuner(monkeypatch):
    return Forced(monkeypatch)


def _gradients(graph, form, given, **options):
    results = call(graph, form, given, seed=3, **options)
    torch.manual_seed(1)
    cotangents = [torch.randn_like(r) for r in results]
    return [*results, *torch.autograd.grad(results, list(given.values()), cotangents)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("edge", [False, True])
@pytest.mark.parametrize("form", ["gat", "gatv2", "dot"])
@pytest.mark.parametrize("name", ["hub", "wide", "isolated", "duplicates"])
def test_the_same_bits(tuner, name, form, edge, dropout, dtype):
    graph = graph_of(name)
    given = inputs(graph, form, edge=edge, dtype=dtype)
    wanted = _gradients(graph, form, given, dropout=dropout)
    tuner.variant = KEPT
    found = _gradients(graph, form, given, dropout=dropout)
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine, theirs)
    assert [variant for _, variant, _ in tuner.told] == [AGAIN, KEPT]
    assert all(seconds > 0 for _, _, seconds in tuner.told)


def test_backward_reads_what_was_kept(tuner, monkeypatch):
    """Scores spoilt between the passes must show: else nothing was read."""
    graph = graph_of("hub")
    given = inputs(graph, "dot", edge=False)
    wanted = _gradients(graph, "dot", given)[1:]
    tuner.variant = KEPT
    kept = []
    plain = kept_scores.pool.empty
    monkeypatch.setattr(kept_scores.pool, "empty", lambda *a: kept.append(plain(*a)) or kept[-1])
    (out,) = call(graph, "dot", given, seed=3)
    kept[0].data.zero_()  # unseen by autograd
    torch.manual_seed(1)
    found = torch.autograd.grad(out, list(given.values()), torch.randn_like(out))
    assert not any(torch.allclose(a, b) for a, b in zip(found, wanted, strict=True))


def test_nothing_is_kept_beyond_its_share_of_memory(tuner, monkeypatch):
    graph = graph_of("hub")
    tuner.variant = KEPT
    monkeypatch.setattr(kept_scores, "_free_bytes", lambda: graph.num_edges * 3 * 8 / kept_scores.MOST - 1)
    _gradients(graph, "gatv2", inputs(graph, "gatv2"))
    assert not tuner.told
    monkeypatch.setattr(kept_scores, "_free_bytes", lambda: graph.num_edges * 3 * 8 / kept_scores.MOST)
    _gradients(graph, "gatv2", inputs(graph, "gatv2"))
    assert [variant for _, variant, _ in tuner.told] == [KEPT]


def test_a_falling_slope_is_never_kept(tuner):
    """leaky_relu's argument cannot be told from the score there."""
    graph = graph_of("hub")
    tuner.variant = KEPT
    _gradients(graph, "gat", inputs(graph, "gat"), negative_slope=-0.2)
    assert not tuner.keys


def test_the_tuner_settles_on_one(monkeypatch):
    monkeypatch.setattr(kept_scores, "LEAST", 0)
    graph = graph_of("hub")
    given = inputs(graph, "gatv2")
    keys = set()
    plain = picker.offer
    monkeypatch.setattr(picker, "offer", lambda key, variants: (keys.add(key), plain(key, variants))[1])
    picker.forget()
    for _ in range(WARM + 2 * TRIES):
        _gradients(graph, "gatv2", given)
    (key,) = keys
    assert picker.decided(key) in (AGAIN, KEPT)
    picker.forget()
    assert picker.offer(key, (AGAIN, KEPT)) == (picker.decided(key), False)  # from disk
