// Edges that come in both directions: which two belong together, and whether their features are the same.
#include <atomic>
#include <cstring>

#include "abi.h"
#include "core/parallel.h"

namespace {

template <class Index>
void find(const stretto_csr& g, const Index* reverse, int64_t* count, Index* pair, int64_t* first, int64_t* second,
          int64_t* ends) {
    const auto* col = static_cast<const Index*>(g.col);
    const auto* id = static_cast<const Index*>(g.edge_id);
    const auto number = [&](int64_t e) { return id ? static_cast<int64_t>(id[e]) : e; };
    int64_t found = 0;
    for (int64_t i = 0; i < g.num_rows; ++i)
        for (int64_t e = g.rowptr[i]; e < g.rowptr[i + 1]; ++e) found += static_cast<int64_t>(col[e]) <= i;
    *count = found;
    if (!pair) return;
    // By the edge's number first: the other direction may come before or after.
    int64_t p = 0;
    for (int64_t i = 0; i < g.num_rows; ++i)
        for (int64_t e = g.rowptr[i]; e < g.rowptr[i + 1]; ++e) {
            const auto j = static_cast<int64_t>(col[e]);
            if (j > i) continue;
            first[p] = number(e), second[p] = static_cast<int64_t>(reverse[e]);
            ends[p] = j, ends[found + p] = i;
            pair[first[p]] = pair[second[p]] = static_cast<Index>(p);
            ++p;
        }
}

}  // namespace

extern "C" {

int stretto_pairs(const stretto_csr* g, const void* reverse, int64_t* count, void* pair, int64_t* first,
                  int64_t* second, int64_t* ends) {
    if (g->index_bytes == 4)
        find(*g, static_cast<const int32_t*>(reverse), count, static_cast<int32_t*>(pair), first, second, ends);
    else
        find(*g, static_cast<const int64_t*>(reverse), count, static_cast<int64_t*>(pair), first, second, ends);
    return 0;
}

int stretto_pair_rows(const void* rows, int64_t row_bytes, const int64_t* first, const int64_t* second, int64_t n,
                      void* out, int threads) {
    constexpr int64_t chunk = 256;
    std::atomic<int> alike{1};
    const auto* from = static_cast<const char*>(rows);
    stretto::parallel_for((n + chunk - 1) / chunk, threads, [&](int64_t c) {
        const int64_t last = (c + 1) * chunk < n ? (c + 1) * chunk : n;
        for (int64_t p = c * chunk; p < last && alike; ++p) {
            const char* row = from + first[p] * row_bytes;
            if (std::memcmp(row, from + second[p] * row_bytes, static_cast<size_t>(row_bytes)) != 0) alike = 0;
            std::memcpy(static_cast<char*>(out) + p * row_bytes, row, static_cast<size_t>(row_bytes));
        }
    });
    return alike;
}

}  // extern "C"
