// One number per edge and head from the rows at its two ends.
#include "core/parallel.h"
#include "kernels/simd.h"
#include "kernels/table.h"

namespace stretto::STRETTO_ISA {

// Calls use(row, begin, end) for the edges of a task, row by row, hub pieces included: per-edge outputs need no
// merging.
template <class Use>
STRETTO_INLINE void for_each_run(const stretto_csr& g, const int64_t* task, Use&& use) {
    if (task[4] >= 0) return use(task[0], task[2], task[3]);
    for (int64_t row = task[0]; row < task[1]; ++row) use(row, g.rowptr[row], g.rowptr[row + 1]);
}

// Products of two rows of NV vectors (0: any number), summed over all but the lanes.
template <class T, int NV>
STRETTO_INLINE Vec<Acc<T>> dot_lanes(const T* p, const T* q, int64_t width) {
    using A = Acc<T>;
    constexpr int L = lanes<A>;
    if constexpr (NV > 0) {
        const int tail = static_cast<int>(width - (NV - 1) * L);
        Vec<A> sum = load_lanes(p + (NV - 1) * L, tail) * load_lanes(q + (NV - 1) * L, tail);
        for (int k = 0; k < NV - 1; ++k) sum = fused(sum, load(p + k * L), load(q + k * L));
        return sum;
    }
    Vec<A> even{}, odd{};
    int64_t k = 0;
    for (; k + 2 * L <= width; k += 2 * L) {
        even = fused(even, load(p + k), load(q + k));
        odd = fused(odd, load(p + k + L), load(q + k + L));
    }
    for (; k < width; k += L) {
        const int n = static_cast<int>(width - k < L ? width - k : L);
        even = fused(even, load_lanes(p + k, n), load_lanes(q + k, n));
    }
    return even + odd;
}

constexpr int dots_ahead = 16;  // edges

template <class T, class Index, int NV>
void sddmm_task(const sddmm_args& a, const int64_t* task) {
    using A = Acc<T>;
    const stretto_csr& g = *a.g;
    const auto* col = static_cast<const Index*>(g.col);
    const auto* edge_id = static_cast<const Index*>(g.edge_id);
    const auto* right = static_cast<const T*>(a.b);
    auto* out = static_cast<A*>(a.out);
    const int64_t row_bytes = a.heads * a.width * static_cast<int64_t>(sizeof(T));
    const int64_t last = task[3];
    const auto column = [&](int64_t e) { return col ? static_cast<int64_t>(col[e]) : e; };
    const auto place = [&](int64_t e) { return edge_id ? static_cast<int64_t>(edge_id[e]) : e; };
    const auto fetch_ahead = [&](int64_t e) __attribute__((always_inline)) {
        e += dots_ahead;
        if (e >= last) return;
        if (col) prefetch_bytes(right + column(e) * a.ldb, row_bytes);
        if (edge_id) __builtin_prefetch(out + place(e) * a.heads, 1);
    };
    for_each_run(g, task, [&](int64_t i, int64_t begin, int64_t end) __attribute__((always_inline)) {
        const T* left = static_cast<const T*>(a.a) + i * a.lda;
        const auto dot = [&](int64_t e, int64_t h) __attribute__((always_inline)) {
            return dot_lanes<T, NV>(left + h * a.width, right + column(e) * a.ldb + h * a.width, a.width);
        };
        int64_t e = begin;
        for (; e + 4 <= end; e += 4) {
            for (int u = 0; u < 4; ++u) fetch_ahead(e + u);
            for (int64_t h = 0; h < a.heads; ++h) {
                Vec<A> lane[4];
                A sum[4];
                for (int u = 0; u < 4; ++u) lane[u] = dot(e + u, h);
                sum_lanes_of_four<A>(lane, sum);
                for (int u = 0; u < 4; ++u) out[place(e + u) * a.heads + h] = sum[u];
            }
        }
        for (; e < end; ++e) {
            fetch_ahead(e);
            for (int64_t h = 0; h < a.heads; ++h) out[place(e) * a.heads + h] = sum_lanes<A>(dot(e, h));
        }
    });
}

template <class T, class Index>
int run_sddmm(const sddmm_args& a) {
    const int64_t vectors = (a.width + lanes<Acc<T>> - 1) / lanes<Acc<T>>;
    constexpr void (*by_vectors[])(const sddmm_args&, const int64_t*) = {
        sddmm_task<T, Index, 0>, sddmm_task<T, Index, 1>, sddmm_task<T, Index, 2>,
        sddmm_task<T, Index, 3>, sddmm_task<T, Index, 4>,
    };
    const auto task = by_vectors[vectors <= 4 ? vectors : 0];
    parallel_for(a.g->num_tasks, a.threads, [&](int64_t t) { task(a, a.g->tasks + 5 * t); });
    return 0;
}

template <class A, class Index>
int run_sddmm_add(const sddmm_add_args& a) {
    const stretto_csr& g = *a.g;
    const auto* col = static_cast<const Index*>(g.col);
    const auto* edge_id = static_cast<const Index*>(g.edge_id);
    const auto* left = static_cast<const A*>(a.a);
    const auto* right = static_cast<const A*>(a.b);
    auto* out = static_cast<A*>(a.out);
    parallel_for(g.num_tasks, a.threads, [&](int64_t t) {
        for_each_run(g, g.tasks + 5 * t, [&](int64_t i, int64_t begin, int64_t end) {
            for (int64_t e = begin; e < end; ++e) {
                const int64_t j = col ? static_cast<int64_t>(col[e]) : e;
                const int64_t id = edge_id ? static_cast<int64_t>(edge_id[e]) : e;
                for (int64_t h = 0; h < a.heads; ++h)
                    out[id * a.heads + h] = left[i * a.heads + h] + right[j * a.heads + h];
            }
        });
    });
    return 0;
}

template <class T>
int sddmm(const sddmm_args& a) {
    return a.g->index_bytes == 4 ? run_sddmm<T, int32_t>(a) : run_sddmm<T, int64_t>(a);
}
FOR_FLOATS(sddmm)

template <class T>
int sddmm_add(const sddmm_add_args& a) {
    return a.g->index_bytes == 4 ? run_sddmm_add<T, int32_t>(a) : run_sddmm_add<T, int64_t>(a);
}
FOR_WIDE(sddmm_add)
}  // namespace stretto::STRETTO_ISA
