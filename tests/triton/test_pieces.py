"""Pieces of rows: they tile the edges in order, hubs are cut, and bounds give the same cut as counts."""

import pytest
import torch


def rows_of(degrees: list[int], device: str) -> torch.Tensor:
    return torch.tensor([0, *degrees], device=device).cumsum(0)


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("degrees", [[3, 0, 40, 8, 9, 0, 17, 1], [100], [0, 0, 9], [9, 9, 9], [16, 8]])
def test_pieces_cover_every_edge_once(degrees, bounded, device, short_pieces, monkeypatch):
    monkeypatch.setattr(short_pieces, "BOUNDED_SLOTS", 1 << 20 if bounded else 0)
    rowptr = rows_of(degrees, device)
    cut = short_pieces.cut(rowptr, len(degrees), sum(degrees), 8)
    edge, row, slot = (t.tolist() for t in (cut.edge, cut.row, cut.slot))
    hub_row, hub_slot = cut.hub_row.tolist(), cut.hub_slot.tolist()
    covered: dict[int, list[int]] = {}
    for p in range(cut.count):
        if row[p] == len(degrees):
            assert bounded
            assert edge[p] == edge[p + 1]
            continue
        assert edge[p + 1] - edge[p] <= 8
        covered.setdefault(row[p], []).extend(range(edge[p], edge[p + 1]))
        assert (slot[p] >= 0) == (degrees[row[p]] > 8)
        if slot[p] >= 0:
            assert cut.slot_piece.tolist()[slot[p]] == p
            hub = hub_row.index(row[p])
            assert hub_slot[hub] <= slot[p] < hub_slot[hub + 1]
            assert cut.slot_first.tolist()[slot[p]] == hub_slot[hub]
            assert cut.slot_last.tolist()[slot[p]] == hub_slot[hub + 1]
    starts = rowptr.tolist()
    assert covered == {i: list(range(starts[i], starts[i + 1])) for i in range(len(degrees))}
    assert sorted(r for r in hub_row if r < len(degrees)) == [i for i, d in enumerate(degrees) if d > 8]
    if not bounded:
        assert cut.num_hubs == sum(d > 8 for d in degrees)


def test_graphs_without_hubs_need_no_arrays(device, short_pieces):
    rowptr = rows_of([2, 3, 0], device)
    cut = short_pieces.cut(rowptr, 3, 5, 8)
    assert cut.edge is rowptr
    assert cut.row is None
    assert cut.count == 3


def test_chunks_grow_with_the_graph(short_pieces, monkeypatch):
    monkeypatch.setattr(short_pieces, "LEAST_CHUNK", 256)
    assert short_pieces.chunk_of(10) == 256
    assert short_pieces.chunk_of(1 << 24) == 256
    assert short_pieces.chunk_of(100 << 20) == 2048
