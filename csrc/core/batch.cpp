// The graph of a mini-batch in one call: checked, sorted by both ends, its work cut. On a few thousand edges a call
// from Python takes as long as the sort inside it.
#include <cstring>

#include "abi.h"

namespace {

// Counts to where each begins.
void to_starts(int64_t* counts, int64_t n) {
    int64_t total = 0;
    for (int64_t i = 0; i <= n; ++i) {
        const int64_t count = counts[i];
        counts[i] = total;
        total += count;
    }
}

// Where each ends, which is where a start has got to when all its entries are placed, to where each begins.
void back_to_starts(int64_t* ends, int64_t n) {
    std::memmove(ends + 1, ends, sizeof(int64_t) * static_cast<size_t>(n));
    ends[0] = 0;
}

// Two stable counting sorts: by row, and of the result by column. Indices lie in range. Returns whether rows were in
// order.
template <class In>
bool sort_both(const In* row, const In* col, int64_t n, int64_t num_rows, int64_t num_cols, int64_t* rowptr,
               int64_t* rowptr_t, int32_t* to_col, int32_t* to_id, int32_t* col_t, int32_t* id_t) {
    std::memset(rowptr, 0, sizeof(int64_t) * static_cast<size_t>(num_rows + 1));
    std::memset(rowptr_t, 0, sizeof(int64_t) * static_cast<size_t>(num_cols + 1));
    bool in_order = true;
    for (int64_t i = 0; i < n; ++i) {
        ++rowptr[row[i]], ++rowptr_t[col[i]];
        in_order &= i == 0 || row[i - 1] <= row[i];
    }
    to_starts(rowptr, num_rows), to_starts(rowptr_t, num_cols);
    for (int64_t i = 0; i < n; ++i) {
        const int64_t at = rowptr[row[i]]++;
        to_col[at] = static_cast<int32_t>(col[i]), to_id[at] = static_cast<int32_t>(i);
    }
    back_to_starts(rowptr, num_rows);
    for (int64_t r = 0; r < num_rows; ++r)
        for (int64_t e = rowptr[r]; e < rowptr[r + 1]; ++e) {
            const int64_t at = rowptr_t[to_col[e]]++;
            col_t[at] = static_cast<int32_t>(r), id_t[at] = to_id[e];
        }
    back_to_starts(rowptr_t, num_cols);
    return in_order;
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
    const auto sort = [&](auto index) {
        using In = decltype(index);
        return sort_both(static_cast<const In*>(row), static_cast<const In*>(col), n, num_rows, num_cols, rowptr,
                         rowptr_t, to_col, to_id, col_t, id_t);
    };
    facts[4] = bytes == 4 ? sort(int32_t{}) : sort(int64_t{});
    facts[5] = num_rows == num_cols &&
               !std::memcmp(rowptr, rowptr_t, sizeof(int64_t) * static_cast<size_t>(num_rows + 1)) &&
               !std::memcmp(to_col, col_t, sizeof(int32_t) * static_cast<size_t>(n));
    status = stretto_schedule(rowptr, num_rows, grain, facts + 6, tasks, hubs);
    if (status < 0) return status;
    if (!facts[5]) return stretto_schedule(rowptr_t, num_cols, grain_t, facts + 9, tasks_t, hubs_t);
    std::memcpy(facts + 9, facts + 6, 3 * sizeof(int64_t));
    return 0;
}
