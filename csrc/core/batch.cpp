// The graph of a mini-batch in one call: checked, sorted by both ends, its work cut. On a few thousand edges a call
// from Python takes as long as the sort inside it.
#include <cstring>

#include "abi.h"

namespace {

// Cuts the work of g, whose tasks go to `tasks` and hubs to `hubs`; both have room.
int cut(stretto_csr& g, int64_t grain, int64_t* tasks, int64_t* hubs) {
    int64_t counts[3];
    const int status = stretto_schedule(g.rowptr, g.num_rows, grain, counts, tasks, hubs);
    g.tasks = tasks, g.hubs = hubs;
    g.num_tasks = counts[0], g.num_hubs = counts[1], g.num_slots = counts[2];
    return status;
}

}  // namespace

extern "C" int stretto_batch_graph(const void* row, const void* col, int64_t bytes, int64_t n, int64_t num_rows,
                                   int64_t num_cols, int64_t grain, int64_t grain_t, int64_t most_tasks,
                                   int64_t* pointers, int32_t* entries, int64_t* facts) {
    int status = stretto_minmax(row, bytes, n, 1, facts, facts + 1);
    if (status >= 0) status = stretto_minmax(col, bytes, n, 1, facts + 2, facts + 3);
    if (status < 0) return status;
    if (facts[0] < 0 || facts[1] >= num_rows || facts[2] < 0 || facts[3] >= num_cols) return 0;  // the caller tells
    int64_t *rowptr = pointers, *rowptr_t = rowptr + num_rows + 1, *tasks = rowptr_t + num_cols + 1,
            *tasks_t = tasks + 5 * most_tasks, *hubs = tasks_t + 5 * most_tasks, *hubs_t = hubs + 3 * most_tasks;
    int32_t *to_col = entries, *to_id = to_col + n, *col_t = to_id + n, *id_t = col_t + n;
    int in_order = 0;
    status = stretto_csr_build(row, col, bytes, n, num_rows, 1, rowptr, to_col, to_id, 4, &in_order);
    if (status < 0) return status;
    const void* order = in_order ? nullptr : to_id;
    stretto_csr g{rowptr, to_col, order, nullptr, nullptr, num_rows, num_cols, n, 0, 0, 0, 4};
    status = cut(g, grain, tasks, hubs);
    if (status >= 0) status = stretto_csr_transpose(&g, 1, rowptr_t, col_t, id_t);
    if (status < 0) return status;
    const bool same = num_rows == num_cols && !std::memcmp(rowptr, rowptr_t, sizeof(int64_t) * (num_rows + 1)) &&
                      !std::memcmp(to_col, col_t, sizeof(int32_t) * n);
    stretto_csr t{rowptr_t, col_t, id_t,        g.tasks,    g.hubs,      num_cols,
                  num_rows, n,     g.num_tasks, g.num_hubs, g.num_slots, 4};
    if (!same) status = cut(t, grain_t, tasks_t, hubs_t);
    const int64_t found[] = {in_order,    same,        g.num_tasks, g.num_hubs,
                             g.num_slots, t.num_tasks, t.num_hubs,  t.num_slots};
    std::memcpy(facts + 4, found, sizeof(found));
    return status;
}
