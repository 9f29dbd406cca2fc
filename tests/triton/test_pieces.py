"""Pieces of rows: whole short rows and windows of hubs, which cover every edge once; the slots of a hub in a row."""

import importlib

import pytest
import torch
import triton.language as tl

from stretto.kernels import reference


@pytest.fixture
def look(triton_kernels):
    """look(cut): what operands.locate and hub_of find, in order."""
    launch = importlib.import_module("stretto.kernels.triton.launch")
    operands = importlib.import_module("stretto.kernels.triton.operands")

    def pieces(rowptr, row_of, windows, chunk, out):
        piece = tl.program_id(0)
        row, slot, start, end = operands.locate(piece, rowptr, row_of, windows, chunk)
        tl.store(out + piece * 4, row)
        tl.store(out + piece * 4 + 1, slot)
        tl.store(out + piece * 4 + 2, start)
        tl.store(out + piece * 4 + 3, end)

    def hubs(rowptr, row_of, windows, chunk, out):
        window = tl.program_id(0)
        row, first, last = operands.hub_of(window, rowptr, row_of, chunk)
        tl.store(out + window * 3, row)
        tl.store(out + window * 3 + 1, first)
        tl.store(out + window * 3 + 2, last)

    names = {"operands": operands, "tl": tl}
    found = []
    for function in (pieces, hubs):
        function.__globals__.update(names)
        found.append(launch.kernel("windows", "chunk")(function))

    def run(cut):
        device = cut.rowptr.device
        out = torch.zeros(cut.count, 4, dtype=torch.int64, device=device)
        found[0][(cut.count,)](*cut.args, out, num_warps=1)
        hub = torch.zeros(cut.windows, 3, dtype=torch.int64, device=device)
        if cut.windows:
            found[1][(cut.windows,)](*cut.args, hub, num_warps=1)
        return out.tolist(), hub.tolist()

    return run


DEGREES = [[3, 0, 40, 8, 9, 0, 17, 1], [100], [0, 0, 9], [9, 9, 9], [16, 8], [8, 8, 17, 0], [15, 0, 0, 9, 1, 30]]


@pytest.mark.parametrize("degrees", DEGREES)
def test_pieces_cover_every_edge_once(degrees, device, short_pieces, look):
    if device == "cuda":
        pytest.skip("kernels of a test's own have no source file to compile")
    rowptr = torch.tensor([0, *degrees], device=device).cumsum(0)
    cut = short_pieces.cut(rowptr, len(degrees), sum(degrees), 8)
    pieces, hubs = look(cut)
    covered: dict[int, list[int]] = {i: [] for i, d in enumerate(degrees) if d == 0}
    slots: dict[int, list[int]] = {}
    for row, slot, start, end in pieces:
        if row < 0:
            assert start == end
            assert slot == -1
            continue
        assert end - start < 16
        covered.setdefault(row, []).extend(range(start, end))
        assert (slot >= 0) == (degrees[row] > 8)
        if slot >= 0:
            slots.setdefault(row, []).append(slot)
    starts = rowptr.tolist()
    assert covered == {i: list(range(starts[i], starts[i + 1])) for i in range(len(degrees))}
    assert sorted(slots) == [i for i, d in enumerate(degrees) if d > 8]
    for row, used in slots.items():
        for slot in used:
            assert hubs[slot] == [row, used[0], used[-1] + 1]
        assert used == list(range(used[0], used[-1] + 1))


def test_graphs_without_hubs_need_no_arrays(device, short_pieces):
    rowptr = torch.tensor([0, 2, 5, 5], device=device)
    cut = short_pieces.cut(rowptr, 3, 5, 8)
    assert cut.args == (rowptr, None, 0, 8)
    assert cut.count == 3


def test_chunks_grow_with_the_graph(short_pieces, monkeypatch):
    monkeypatch.setattr(short_pieces, "LEAST_CHUNK", 256)
    assert short_pieces.chunk_of(10) == 256
    assert short_pieces.chunk_of(1 << 24) == 256
    assert short_pieces.chunk_of(100 << 20) == 2048


def test_rows_that_are_said_to_be_short_are_pieces_of_their_own(triton_kernels, make):
    csr = make("hub")
    x = torch.randn(csr.num_cols, 8, device=csr.device)
    wanted = reference.spmm(csr, x)[0]
    triton_kernels.short_rows(csr)
    cut = importlib.import_module("stretto.kernels.triton.pieces").pieces(csr)
    assert (cut.count, cut.row, cut.windows) == (csr.num_rows, None, 0)
    torch.testing.assert_close(triton_kernels.spmm(csr, x)[0], wanted)
