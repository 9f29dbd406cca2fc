"""Memory that a chain of ops uses again: where, in the model, results came to lie in memory that was free."""

import torch

from stretto.analyze.places import overlap, places_of
from stretto.analyze.subject import subject
from stretto.analyze.workload import Workload
from stretto.profile.chain import Tape
from stretto.profile.chain_run import Reuse, run
from stretto.profile.replay import _step


def test_memory_is_used_again_where_the_model_used_it_again():
    """Not at once, when it is freed: only when a result of the model came to lie where it was."""
    first, second, third = (100, 50), (200, 50), (120, 10)  # the third in the place of the first
    reuse, kept = Reuse([[first], [second], [third]]), [torch.empty(8).untyped_storage() for _ in range(3)]
    for place, storage in enumerate(kept[:2]):
        reuse.release(place)
        reuse.made(place, place, 0)
        reuse.drop(place, storage)
    assert set(reuse._held) == {0, 1}
    reuse.release(2)
    assert set(reuse._held) == {1}


def test_places_overlap_where_they_share_a_byte():
    assert overlap((10, 5), (14, 1))
    assert overlap((14, 1), (10, 5))
    assert overlap((10, 5), (10, 5))
    assert not overlap((10, 5), (15, 3))
    assert not overlap((15, 3), (10, 5))
    assert not overlap((10, 0), (10, 5))
    x = torch.randn(6, 4)
    assert places_of((x, None, x.to_sparse())) == [(x.data_ptr(), 96)]


def test_a_step_tells_where_its_results_lay():
    workload = Workload(*subject("gcn", "er:300:2000", 8, 2))
    tape = Tape(workload)
    step = _step(workload)
    assert [len(found) for found in step.places] == [len(found) for found in run(tape).places]
    assert any(address and size for found in step.places for address, size in found)
    assert len(run(tape, places=step.places).times) == len(tape.calls)
