// One number per edge and head from the rows at its two ends.
#pragma once
#include "core/parallel.h"
#include "kernels/simd.h"
#include "kernels/table.h"

namespace stretto::STRETTO_ISA {

// Calls use(row, edge) for every edge of a task, hub pieces included: per-edge outputs need no merging.
template <class Use>
STRETTO_INLINE void for_each_edge(const stretto_csr& g, const int64_t* task, Use&& use) {
    if (task[4] >= 0) {
        for (int64_t e = task[2]; e < task[3]; ++e) use(task[0], e);
        return;
    }
    for (int64_t row = task[0]; row < task[1]; ++row)
        for (int64_t e = g.rowptr[row]; e < g.rowptr[row + 1]; ++e) use(row, e);
}

template <class T, class Index>
int run_sddmm(const SddmmArgs& a) {
    using A = Acc<T>;
    constexpr int L = lanes<A>;
    const stretto_csr& g = *a.g;
    const auto* col = static_cast<const Index*>(g.col);
    const auto* edge_id = static_cast<const Index*>(g.edge_id);
    const auto* left = static_cast<const T*>(a.a);
    const auto* right = static_cast<const T*>(a.b);
    auto* out = static_cast<A*>(a.out);
    const int64_t row_bytes = a.heads * a.width * static_cast<int64_t>(sizeof(T));
    parallel_for(g.num_tasks, a.threads, [&](int64_t t) {
        for_each_edge(g, g.tasks + 5 * t, [&](int64_t i, int64_t e) {
            const int64_t j = col ? static_cast<int64_t>(col[e]) : e;
            const int64_t id = edge_id ? static_cast<int64_t>(edge_id[e]) : e;
            if (col && e + 6 < g.num_edges) prefetch_bytes(right + static_cast<int64_t>(col[e + 6]) * a.ldb, row_bytes);
            for (int64_t h = 0; h < a.heads; ++h) {
                const T* p = left + i * a.lda + h * a.width;
                const T* q = right + j * a.ldb + h * a.width;
                Vec<A> even{}, odd{};
                int64_t k = 0;
                for (; k + 2 * L <= a.width; k += 2 * L) {
                    even += load(p + k) * load(q + k);
                    odd += load(p + k + L) * load(q + k + L);
                }
                for (; k < a.width; k += L) {
                    const int n = static_cast<int>(a.width - k < L ? a.width - k : L);
                    even += load_lanes(p + k, n) * load_lanes(q + k, n);
                }
                out[id * a.heads + h] = sum_lanes<A>(even + odd);
            }
        });
    });
    return 0;
}

template <class A, class Index>
int run_sddmm_add(const EdgeArgs& a) {
    const stretto_csr& g = *a.g;
    const auto* col = static_cast<const Index*>(g.col);
    const auto* edge_id = static_cast<const Index*>(g.edge_id);
    const auto* left = static_cast<const A*>(a.a);
    const auto* right = static_cast<const A*>(a.b);
    auto* out = static_cast<A*>(a.out);
    parallel_for(g.num_tasks, a.threads, [&](int64_t t) {
        for_each_edge(g, g.tasks + 5 * t, [&](int64_t i, int64_t e) {
            const int64_t j = col ? static_cast<int64_t>(col[e]) : e;
            const int64_t id = edge_id ? static_cast<int64_t>(edge_id[e]) : e;
            for (int64_t h = 0; h < a.width; ++h)
                out[id * a.width + h] = left[i * a.width + h] + right[j * a.width + h];
        });
    });
    return 0;
}

}  // namespace stretto::STRETTO_ISA
