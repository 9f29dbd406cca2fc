"""Graph construction: CSR from index pairs, transpose, the schedule of tasks, content hashes.

The native version sorts by counting; without the library the same comes from torch.sort. Devices other than the CPU use
torch's own sort and scans, which stay on the device.
"""

from __future__ import annotations

import ctypes
import hashlib

import torch
from torch import Tensor

from stretto.kernels import cpu, native
from stretto.kernels.csr import Csr
from stretto.kernels.schema import CPU
from stretto.memory import pages


def minmax(index: Tensor) -> tuple[int, int]:
    """Smallest and largest index; (0, -1) when there is none."""
    if index.numel() == 0:
        return 0, -1
    if not is_native(index):
        least, most = torch.stack(torch.aminmax(index)).tolist()  # one look at the device, not two
        return int(least), int(most)
    index = index.contiguous()
    least_c, most_c = ctypes.c_int64(), ctypes.c_int64()
    ends = ctypes.addressof(least_c), ctypes.addressof(most_c)
    native.call("stretto_minmax", index, index.element_size(), index.numel(), torch.get_num_threads(), *ends)
    return least_c.value, most_c.value


def survey(row: Tensor, col: Tensor) -> tuple[tuple[int, int], tuple[int, int], bool | None]:
    """minmax of both, and whether row is in order (None: not looked at); from one look at a device, not three."""
    if row.numel() == 0 or is_native(row):
        return minmax(row), minmax(col), None
    ends = [*torch.aminmax(row), *torch.aminmax(col), (row[1:] >= row[:-1]).all()]
    row_least, row_most, col_least, col_most, in_order = torch.stack([e.to(row.dtype) for e in ends]).tolist()
    return (row_least, row_most), (col_least, col_most), bool(in_order)


def compress(
    row: Tensor, col: Tensor | None, num_rows: int, dtype: torch.dtype, *, in_order: bool | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Stable sort of the pairs (row, col) by row -> rowptr [num_rows + 1], col, edge_id (None: already in order).

    Indices must lie in range. col None: only the order is wanted. in_order: whether row is sorted, where known.
    """
    n = row.numel()
    if not is_native(row):
        if in_order is None:
            in_order = bool((row[1:] >= row[:-1]).all()) if n > 1 else True
        keys, order = (row, None) if in_order else torch.sort(_narrow(row, num_rows), stable=True)
        rowptr = _pointers(keys, num_rows)
        if order is None:
            return rowptr, None if col is None else col.to(dtype), None
        return rowptr, None if col is None else col[order].to(dtype), order.to(dtype)
    row = row.contiguous()
    col = None if col is None else col.contiguous()
    rowptr = torch.empty(num_rows + 1, dtype=torch.int64, device=CPU)
    out_col = None if col is None else torch.empty(n, dtype=dtype, device=CPU)
    out_id = torch.empty(n, dtype=dtype, device=CPU)
    pages.written_at_random(out_col, out_id)
    in_order_c = ctypes.c_int()
    pairs, results = (row, col, row.element_size(), n), (rowptr, out_col, out_id, out_id.element_size())
    native.call("stretto_csr_build", *pairs, num_rows, torch.get_num_threads(), *results, ctypes.addressof(in_order_c))
    return rowptr, out_col, None if in_order_c.value else out_id


def rows_sorted(csr: Csr) -> bool:
    """Whether every row's columns are in non-descending order."""
    if csr.col is None or csr.num_edges < 2:
        return True
    if not is_native(csr.rowptr):
        step_down = csr.col[1:] < csr.col[:-1]
        starts = torch.zeros(csr.num_edges + 1, dtype=torch.bool, device=csr.device)
        starts[csr.rowptr] = True
        return not bool((step_down & ~starts[1:-1]).any())
    in_order = ctypes.c_int()
    native.call("stretto_csr_rows_sorted", cpu.struct(csr), torch.get_num_threads(), ctypes.addressof(in_order))
    return bool(in_order.value)


def transpose(csr: Csr) -> tuple[Tensor, Tensor, Tensor]:
    """rowptr [num_cols + 1], col [E], edge_id [E] of the transposed matrix, its rows sorted by column."""
    dtype = csr.col.dtype if csr.col is not None else (csr.edge_id.dtype if csr.edge_id is not None else torch.int32)
    if not is_native(csr.rowptr):
        keys, order = torch.sort(csr.columns() if csr.col is None else _narrow(csr.col, csr.num_cols), stable=True)
        rowptr = _pointers(keys, csr.num_cols)
        ids = order if csr.edge_id is None else csr.edge_id[order]
        # The row of an entry by bisection: no array of all rows, no host sync.
        rows = torch.searchsorted(csr.rowptr, order, right=True, out_int32=dtype == torch.int32).sub_(1)
        return rowptr, rows, ids.to(dtype)
    rowptr = torch.empty(csr.num_cols + 1, dtype=torch.int64, device=CPU)
    col, ids = torch.empty(csr.num_edges, dtype=dtype, device=CPU), torch.empty(csr.num_edges, dtype=dtype, device=CPU)
    pages.written_at_random(col, ids)
    native.call("stretto_csr_transpose", cpu.struct(csr), torch.get_num_threads(), rowptr, col, ids)
    return rowptr, col, ids


# Below this many edges a graph on a device is taken for a mini-batch, used for a step or two: its transpose keeps what
# it knows of the edges' order, and is not compared with the graph, for which the host would have to wait.
BATCH = 1 << 20


def passing(csr: Csr) -> bool:
    """Whether a graph looks like a mini-batch on a device."""
    return not is_native(csr.rowptr) and csr.device.type != "cpu" and csr.num_edges < BATCH


# A task is at least this many edges plus rows: below it, handing out work costs more than it gains. A graph is cut into
# at most this many tasks: enough to balance any number of threads, few enough for partial results to stay small. A
# mini-batch of few edges is cut finer, down to FINEST, so that its few tasks still keep every thread busy to the end.
LEAST_GRAIN, MOST_TASKS = 2048, 512
FINEST, FEWEST_TASKS = 256, 8


def _grain(work: int) -> int:
    return max(min(LEAST_GRAIN, max(FINEST, work // FEWEST_TASKS)), work // MOST_TASKS)


def schedule(rowptr: Tensor, num_rows: int, num_edges: int) -> tuple[Tensor, Tensor, int]:
    """tasks [T, 5], hubs [H, 3] (csrc/abi.h) and the number of partial results, from the graph alone."""
    grain = _grain(num_rows + num_edges)
    if not is_native(rowptr):  # other devices cut their work themselves, without a copy to the host
        return torch.empty(0, 5, dtype=torch.int64, device=CPU), torch.empty(0, 3, dtype=torch.int64, device=CPU), 0
    counts = torch.zeros(3, dtype=torch.int64, device=CPU)
    native.call("stretto_schedule", rowptr, num_rows, grain, counts, None, None)
    num_tasks, num_hubs, num_slots = counts.tolist()
    tasks = torch.empty(num_tasks, 5, dtype=torch.int64, device=CPU)
    hubs = torch.empty(num_hubs, 3, dtype=torch.int64, device=CPU)
    native.call("stretto_schedule", rowptr, num_rows, grain, counts, tasks, hubs)
    return tasks, hubs, num_slots


# A graph of fewer edges than this, and not many more nodes, is made with its transpose in one call.
FEW_EDGES = 1 << 16


def of_few(
    row: Tensor, col: Tensor, num_rows: int, num_cols: int
) -> tuple[tuple[int, int], tuple[int, int], Csr | None, Csr | None]:
    """The matrix of few pairs (row, col) and its transpose, which shares its arrays where it is the same; before them,
    smallest and largest row and column: where these are out of range, nothing is made. All on the CPU, row and col [E].
    """
    n = row.numel()
    grain, grain_t = _grain(num_rows + n), _grain(num_cols + n)
    most = max(3 * (num_rows + n) // grain, 3 * (num_cols + n) // grain_t) + 3  # a row that is cut ends the task before
    at = num_rows + num_cols + 2  # of the tasks; those of the transpose and the hubs of both follow
    pointers = torch.empty(at + 16 * most, dtype=torch.int64, device=CPU)
    entries = torch.empty(4, n, dtype=torch.int32, device=CPU)
    row, col = row.contiguous(), col.contiguous()
    facts = (ctypes.c_int64 * 12)()
    sizes, results = (n, num_rows, num_cols, grain, grain_t, most), (pointers, entries, ctypes.addressof(facts))
    native.call("stretto_batch_graph", row, col, row.element_size(), *sizes, *results)
    rows, cols, (in_order, same, *counts) = (facts[0], facts[1]), (facts[2], facts[3]), facts[4:]
    if rows[0] < 0 or rows[1] >= num_rows or cols[0] < 0 or cols[1] >= num_cols:
        return rows, cols, None, None
    rowptr = pointers.narrow(0, 0, num_rows + 1)
    col, ids, col_t, ids_t = entries.unbind()
    cut = _cut(pointers, at, at + 10 * most, *counts[:3])
    csr = Csr(rowptr, col, None if in_order else ids, num_rows, num_cols, n, *cut)
    if same:
        return rows, cols, csr, Csr(rowptr, col, ids_t, num_cols, num_rows, n, *cut)
    rowptr_t = pointers.narrow(0, num_rows + 1, num_cols + 1)
    cut_t = _cut(pointers, at + 5 * most, at + 13 * most, *counts[3:])
    return rows, cols, csr, Csr(rowptr_t, col_t, ids_t, num_cols, num_rows, n, *cut_t)


def _cut(
    pointers: Tensor, tasks: int, hubs: int, num_tasks: int, num_hubs: int, num_slots: int
) -> tuple[Tensor, Tensor, int]:
    """tasks [T, 5] and hubs [H, 3] at these places among the pointers."""
    cut = pointers.as_strided((num_tasks, 5), (5, 1), tasks), pointers.as_strided((num_hubs, 3), (3, 1), hubs)
    return *cut, num_slots


def content_hash(tensor: Tensor) -> tuple[int, int] | None:
    """128 bits of a tensor's content, or None off the CPU, where they cannot be had at memory speed."""
    if tensor.device.type != "cpu" or type(tensor) is not Tensor:
        return None
    tensor = tensor.contiguous()
    if native.library() is None:
        digest = hashlib.blake2b(tensor.view(-1).view(torch.uint8).numpy().tobytes(), digest_size=16).digest()
        return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
    out = (ctypes.c_int64 * 2)()
    native.call("stretto_hash", tensor, tensor.nbytes, torch.get_num_threads(), ctypes.addressof(out))
    return out[0], out[1]


def _narrow(index: Tensor, size: int) -> Tensor:
    """index in the narrowest type: a radix sort takes time by the byte."""
    return index.to(torch.int32) if size < 2**31 else index


def _pointers(keys: Tensor, size: int) -> Tensor:
    """Where each of `size` rows begins among sorted keys. [size + 1] int64; found by bisection, without a host sync."""
    return torch.searchsorted(keys.contiguous(), torch.arange(size + 1, dtype=keys.dtype, device=keys.device))


def is_native(tensor: Tensor) -> bool:
    """Whether libstretto can read a tensor where it lies."""
    # A subclass may have no storage to point to: torch's own operations know what to do with it.
    return type(tensor) is Tensor and tensor.device.type == "cpu" and native.library() is not None
