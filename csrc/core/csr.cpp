// Building, checking and transposing CSR matrices by stable counting sort.
#include <atomic>
#include <memory>

#include "abi.h"
#include "core/error.h"
#include "core/parallel.h"

namespace {

using stretto::error;
using stretto::parallel_for;

constexpr int64_t least_chunk = int64_t{1} << 16;

// How many chunks a range is cut into; each gets a histogram of its own, so more than one per thread is waste.
int64_t chunks_for(int64_t n, int threads) {
    const int64_t most = (n + least_chunk - 1) / least_chunk;
    return most < threads ? (most < 1 ? 1 : most) : threads;
}

template <class In>
void minmax(const In* index, int64_t n, int threads, int64_t* least, int64_t* most) {
    const int64_t chunks = chunks_for(n, threads);
    auto low = std::make_unique<int64_t[]>(static_cast<size_t>(chunks)),
         high = std::make_unique<int64_t[]>(static_cast<size_t>(chunks));
    parallel_for(chunks, threads, [&](int64_t c) {
        In a = index[0], b = index[0];
        for (int64_t i = n * c / chunks; i < n * (c + 1) / chunks; ++i) {
            a = index[i] < a ? index[i] : a;
            b = index[i] > b ? index[i] : b;
        }
        low[static_cast<size_t>(c)] = a;
        high[static_cast<size_t>(c)] = b;
    });
    *least = low[0];
    *most = high[0];
    for (size_t c = 1; c < static_cast<size_t>(chunks); ++c) {
        if (low[c] < *least) *least = low[c];
        if (high[c] > *most) *most = high[c];
    }
}

// Entries ahead of the one that is placed: their counters are asked for at twice that, their places at once that. A
// place that others take meanwhile is near the one that was asked for.
constexpr int64_t ahead = 16;

// Sorts n entries by row(i), stably, and calls place(i, position) for each, soon(position) some time before. Fills
// rowptr. Count: holds n.
template <class Count, class Row, class Soon, class Place>
int sort_with(int64_t n, int64_t num_rows, int threads, int64_t* rowptr, Row&& row, Soon&& soon, Place&& place) {
    const int64_t chunks = chunks_for(n, threads);
    const auto cells = static_cast<size_t>(chunks * num_rows);
    std::unique_ptr<Count[]> start(new (std::nothrow) Count[cells]());
    if (!start && cells) return error("out of memory for %zu counters", cells);
    parallel_for(chunks, threads, [&](int64_t c) {
        Count* count = start.get() + c * num_rows;
        for (int64_t i = n * c / chunks; i < n * (c + 1) / chunks; ++i) ++count[row(i)];
    });
    Count total = 0;
    for (int64_t r = 0; r < num_rows; ++r) {
        rowptr[r] = static_cast<int64_t>(total);
        for (int64_t c = 0; c < chunks; ++c) {
            const Count count = start[static_cast<size_t>(c * num_rows + r)];
            start[static_cast<size_t>(c * num_rows + r)] = total;
            total += count;
        }
    }
    rowptr[num_rows] = static_cast<int64_t>(total);
    parallel_for(chunks, threads, [&](int64_t c) {
        Count* next = start.get() + c * num_rows;
        const int64_t begin = n * c / chunks, end = n * (c + 1) / chunks;
        const int64_t full = end - begin > 2 * ahead ? end - 2 * ahead : begin;
        for (int64_t i = begin; i < full; ++i) {
            __builtin_prefetch(next + row(i + 2 * ahead), 1);
            soon(static_cast<int64_t>(next[row(i + ahead)]));
            place(i, static_cast<int64_t>(next[row(i)]++));
        }
        for (int64_t i = full; i < end; ++i) place(i, static_cast<int64_t>(next[row(i)]++));
    });
    return 0;
}

template <class Row, class Soon, class Place>
int counting_sort(int64_t n, int64_t num_rows, int threads, int64_t* rowptr, Row&& row, Soon&& soon, Place&& place) {
    if (n <= int64_t{UINT32_MAX}) return sort_with<uint32_t>(n, num_rows, threads, rowptr, row, soon, place);
    return sort_with<uint64_t>(n, num_rows, threads, rowptr, row, soon, place);
}

template <class In>
bool is_sorted(const In* row, int64_t n, int threads) {
    const int64_t chunks = chunks_for(n, threads);
    std::atomic<bool> sorted{true};
    parallel_for(chunks, threads, [&](int64_t c) {
        const int64_t begin = n * c / chunks > 0 ? n * c / chunks : 1;
        for (int64_t i = begin; i < n * (c + 1) / chunks; ++i)
            if (row[i] < row[i - 1]) {
                sorted = false;
                return;
            }
    });
    return sorted;
}

template <class In, class Out>
int build(const In* row, const In* col, int64_t n, int64_t num_rows, int threads, int64_t* rowptr, Out* out_col,
          Out* out_id, int* sorted) {
    const bool in_order = is_sorted(row, n, threads);
    if (sorted) *sorted = in_order;
    if (!in_order)
        return counting_sort(
            n, num_rows, threads, rowptr, [&](int64_t i) { return static_cast<int64_t>(row[i]); },
            [&](int64_t at) {
                if (out_col) __builtin_prefetch(out_col + at, 1);
                if (out_id) __builtin_prefetch(out_id + at, 1);
            },
            [&](int64_t i, int64_t at) {
                if (out_col) out_col[at] = static_cast<Out>(col[i]);
                if (out_id) out_id[at] = static_cast<Out>(i);
            });
    const int64_t chunks = chunks_for(n, threads);
    parallel_for(chunks, threads, [&](int64_t c) {
        for (int64_t i = n * c / chunks; i < n * (c + 1) / chunks; ++i) {
            // Rows (previous, this one] start here; the rows after the last entry are filled below.
            for (int64_t r = i ? static_cast<int64_t>(row[i - 1]) + 1 : 0; r <= static_cast<int64_t>(row[i]); ++r)
                rowptr[r] = i;
            if (out_col) out_col[i] = static_cast<Out>(col[i]);
            if (out_id) out_id[i] = static_cast<Out>(i);
        }
    });
    for (int64_t r = n ? static_cast<int64_t>(row[n - 1]) + 1 : 0; r <= num_rows; ++r) rowptr[r] = n;
    return 0;
}

template <class Index>
int transpose(const stretto_csr& g, int threads, int64_t* rowptr, Index* out_col, Index* out_id) {
    const auto* col = static_cast<const Index*>(g.col);
    const auto* id = static_cast<const Index*>(g.edge_id);
    // The row of each entry, so that the sort can walk entries instead of rows.
    std::unique_ptr<Index[]> row(new (std::nothrow) Index[static_cast<size_t>(g.num_edges)]);
    if (!row && g.num_edges) return error("out of memory for %ld row indices", static_cast<long>(g.num_edges));
    parallel_for(g.num_tasks, threads, [&](int64_t t) {
        const int64_t* task = g.tasks + 5 * t;
        if (task[4] >= 0) {
            for (int64_t e = task[2]; e < task[3]; ++e) row[static_cast<size_t>(e)] = static_cast<Index>(task[0]);
            return;
        }
        for (int64_t r = task[0]; r < task[1]; ++r)
            for (int64_t e = g.rowptr[r]; e < g.rowptr[r + 1]; ++e) row[static_cast<size_t>(e)] = static_cast<Index>(r);
    });
    return counting_sort(
        g.num_edges, g.num_cols, threads, rowptr, [&](int64_t e) { return static_cast<int64_t>(col ? col[e] : e); },
        [&](int64_t at) {
            __builtin_prefetch(out_col + at, 1);
            if (out_id) __builtin_prefetch(out_id + at, 1);
        },
        [&](int64_t e, int64_t at) {
            out_col[at] = row[static_cast<size_t>(e)];
            if (out_id) out_id[at] = id ? id[e] : static_cast<Index>(e);
        });
}

}  // namespace

extern "C" {

int stretto_minmax(const void* index, int64_t bytes, int64_t n, int threads, int64_t* least, int64_t* most) {
    *least = 0;
    *most = -1;
    if (n == 0) return 0;
    if (bytes == 4)
        minmax(static_cast<const int32_t*>(index), n, threads, least, most);
    else
        minmax(static_cast<const int64_t*>(index), n, threads, least, most);
    return 0;
}

int stretto_csr_build(const void* row, const void* col, int64_t bytes, int64_t n, int64_t num_rows, int threads,
                      int64_t* rowptr, void* out_col, void* out_id, int64_t out_bytes, int* sorted) {
    const auto run = [&](auto in, auto out) {
        using In = decltype(in);
        using Out = decltype(out);
        return build(static_cast<const In*>(row), static_cast<const In*>(col), n, num_rows, threads, rowptr,
                     static_cast<Out*>(out_col), static_cast<Out*>(out_id), sorted);
    };
    if (bytes == 4) return out_bytes == 4 ? run(int32_t{}, int32_t{}) : run(int32_t{}, int64_t{});
    return out_bytes == 4 ? run(int64_t{}, int32_t{}) : run(int64_t{}, int64_t{});
}

int stretto_csr_rows_sorted(const stretto_csr* g, int threads, int* sorted) {
    std::atomic<bool> in_order{true};
    const auto run = [&](auto index) {
        const auto* col = static_cast<const decltype(index)*>(g->col);
        parallel_for(col ? g->num_tasks : 0, threads, [&](int64_t t) {
            const int64_t* task = g->tasks + 5 * t;
            for (int64_t r = task[0]; r < task[1]; ++r) {
                const int64_t first = task[4] >= 0 ? task[2] : g->rowptr[r],
                              end = task[4] >= 0 ? task[3] : g->rowptr[r + 1];
                for (int64_t e = first > g->rowptr[r] ? first : first + 1; e < end; ++e)
                    if (col[e] < col[e - 1]) {
                        in_order = false;
                        return;
                    }
            }
        });
    };
    if (g->index_bytes == 4)
        run(int32_t{});
    else
        run(int64_t{});
    *sorted = in_order;
    return 0;
}

int stretto_csr_transpose(const stretto_csr* g, int threads, int64_t* rowptr, void* col, void* id) {
    if (g->index_bytes == 4)
        return transpose(*g, threads, rowptr, static_cast<int32_t*>(col), static_cast<int32_t*>(id));
    return transpose(*g, threads, rowptr, static_cast<int64_t*>(col), static_cast<int64_t*>(id));
}

}  // extern "C"
