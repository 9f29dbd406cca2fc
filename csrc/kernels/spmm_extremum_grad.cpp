// Gradient of max and min aggregation: the upstream gradient, shared evenly among the entries that attain the extremum
// (as torch.scatter_reduce does), flows back along the transposed edges in one pass.
#include "core/parallel.h"
#include "kernels/simd.h"
#include "kernels/table.h"

namespace stretto::STRETTO_ISA {

template <class T, class Index>
int run_spmm_extremum_grad(const spmm_extremum_grad_args& a) {
    using A = Acc<T>;
    constexpr int L = lanes<A>;
    const stretto_csr& g = *a.g;
    const auto* col = static_cast<const Index*>(g.col);
    const auto* edge_id = static_cast<const Index*>(g.edge_id);
    const auto* x = static_cast<const T*>(a.x);
    const auto* out = static_cast<const T*>(a.out);
    const auto* share = static_cast<const A*>(a.share);
    const auto* weight = static_cast<const A*>(a.weight);
    auto* dx = static_cast<A*>(a.dx);
    auto* dweight = static_cast<A*>(a.dweight);
    const int64_t K = a.heads * a.width, block = a.weight_heads > 1 ? a.width : K,
                  blocks = a.weight_heads > 1 ? a.heads : 1;
    A* slots = nullptr;
    if (g.num_slots > 0 && dx) {
        slots = static_cast<A*>(__builtin_malloc(static_cast<size_t>(g.num_slots * K) * sizeof(A)));
        if (!slots) return -2;
    }
    // Edges [begin, end) of source row j, added into `into` [K].
    const auto edges = [&](int64_t j, int64_t begin, int64_t end, A* into) {
        if (into) __builtin_memset(into, 0, static_cast<size_t>(K) * sizeof(A));
        const T* xj = x + j * K;
        for (int64_t e = begin; e < end; ++e) {
            const int64_t i = col ? static_cast<int64_t>(col[e]) : e;
            const int64_t id = edge_id ? static_cast<int64_t>(edge_id[e]) : e;
            if (e + 4 < end && col) {
                prefetch_bytes(out + static_cast<int64_t>(col[e + 4]) * K, K * static_cast<int64_t>(sizeof(T)));
                prefetch_bytes(share + static_cast<int64_t>(col[e + 4]) * K, K * static_cast<int64_t>(sizeof(A)));
            }
            for (int64_t b = 0; b < blocks; ++b) {
                const A w = weight ? weight[id * a.weight_heads + b] : A(1);
                Vec<A> dot{};
                for (int64_t k = b * block; k < (b + 1) * block; k += L) {
                    const int n = static_cast<int>((b + 1) * block - k < L ? (b + 1) * block - k : L);
                    const Vec<A> value = load_lanes(xj + k, n);
                    const Vec<A> most = load_lanes(out + i * K + k, n);
                    const Vec<A> message = weight ? as_stored<T>(w * value) : value;
                    Vec<A> part = message == most ? load_lanes(share + i * K + k, n) : Vec<A>{};
                    part = most == most ? part : most;  // a NaN reaches the gradient of all entries, as in torch
                    if (into) store_lanes(into + k, load_lanes(into + k, n) + w * part, n);
                    dot += value * part;
                }
                if (dweight) dweight[id * a.weight_heads + b] = sum_lanes<A>(dot);
            }
        }
    };
    parallel_for(g.num_tasks, a.threads, [&](int64_t t) {
        const int64_t* task = g.tasks + 5 * t;
        if (task[4] >= 0) {
            edges(task[0], task[2], task[3], slots ? slots + task[4] * K : nullptr);
            return;
        }
        for (int64_t j = task[0]; j < task[1]; ++j) edges(j, g.rowptr[j], g.rowptr[j + 1], dx ? dx + j * K : nullptr);
    });
    if (slots) {
        parallel_for(g.num_hubs, a.threads, [&](int64_t h) {
            const int64_t* hub = g.hubs + 3 * h;
            A* into = dx + hub[0] * K;
            __builtin_memset(into, 0, static_cast<size_t>(K) * sizeof(A));
            for (int64_t s = hub[1]; s < hub[2]; ++s)
                for (int64_t k = 0; k < K; ++k) into[k] += slots[s * K + k];
        });
        __builtin_free(slots);
    }
    return 0;
}

template <class T>
int spmm_extremum_grad(const spmm_extremum_grad_args& a) {
    return a.g->index_bytes == 4 ? run_spmm_extremum_grad<T, int32_t>(a) : run_spmm_extremum_grad<T, int64_t>(a);
}
FOR_FLOATS(spmm_extremum_grad)
}  // namespace stretto::STRETTO_ISA
