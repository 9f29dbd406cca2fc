// Kernels that need a whole row's edges at once, one column at a time: softmax over a row, its gradient, and the
// gradient of a product. Long rows are not cut: a row is the work of one thread.
#include <cmath>

#include "core/parallel.h"
#include "kernels/simd.h"
#include "kernels/table.h"

namespace stretto::STRETTO_ISA {

// Calls use(begin, end) for every row that a task owns; a long row belongs to its first piece.
template <class Use>
STRETTO_INLINE void for_each_row(const stretto_csr& g, const int64_t* task, Use&& use) {
    if (task[4] >= 0) {
        if (task[2] == g.rowptr[task[0]]) use(task[0], g.rowptr[task[0]], g.rowptr[task[0] + 1]);
        return;
    }
    for (int64_t row = task[0]; row < task[1]; ++row)
        if (g.rowptr[row] < g.rowptr[row + 1]) use(row, g.rowptr[row], g.rowptr[row + 1]);
}

template <class A>
STRETTO_INLINE A exponential(A v) {
    if constexpr (std::is_same_v<A, float>)
        return __builtin_expf(v);
    else
        return __builtin_exp(v);
}

template <class A, class Index>
int run_edge_softmax(const edge_softmax_args& a) {
    const stretto_csr& g = *a.g;
    const auto* edge_id = static_cast<const Index*>(g.edge_id);
    const auto* score = static_cast<const A*>(a.score);
    auto* out = static_cast<A*>(a.out);
    const int64_t H = a.heads;
    const auto at = [&](int64_t e, int64_t h) { return (edge_id ? static_cast<int64_t>(edge_id[e]) : e) * H + h; };
    parallel_for(g.num_tasks, a.threads, [&](int64_t t) {
        for_each_row(g, g.tasks + 5 * t, [&](int64_t, int64_t begin, int64_t end) {
            for (int64_t h = 0; h < H; ++h) {
                A most = -__builtin_inf();
                double sum = 0;
                for (int64_t e = begin; e < end; ++e) {
                    const A s = score[at(e, h)];
                    most = s > most || s != s ? s : most;
                }
                for (int64_t e = begin; e < end; ++e) {
                    const A p = exponential<A>(score[at(e, h)] - most);
                    out[at(e, h)] = p;
                    sum += p;
                }
                for (int64_t e = begin; e < end; ++e) out[at(e, h)] /= static_cast<A>(sum);
            }
        });
    });
    return 0;
}

template <class A, class Index>
int run_edge_softmax_grad(const edge_softmax_grad_args& a) {
    const stretto_csr& g = *a.g;
    const auto* edge_id = static_cast<const Index*>(g.edge_id);
    const auto* alpha = static_cast<const A*>(a.alpha);
    const auto* grad = static_cast<const A*>(a.grad);
    auto* out = static_cast<A*>(a.out);
    const int64_t H = a.heads;
    const auto at = [&](int64_t e, int64_t h) { return (edge_id ? static_cast<int64_t>(edge_id[e]) : e) * H + h; };
    parallel_for(g.num_tasks, a.threads, [&](int64_t t) {
        for_each_row(g, g.tasks + 5 * t, [&](int64_t, int64_t begin, int64_t end) {
            for (int64_t h = 0; h < H; ++h) {
                double sum = 0;
                for (int64_t e = begin; e < end; ++e) sum += alpha[at(e, h)] * grad[at(e, h)];
                const A whole = static_cast<A>(sum);
                for (int64_t e = begin; e < end; ++e) out[at(e, h)] = alpha[at(e, h)] * (grad[at(e, h)] - whole);
            }
        });
    });
    return 0;
}

template <class A, class Index>
int run_mul_grad(const mul_grad_args& a) {
    const stretto_csr& g = *a.g;
    const auto* edge_id = static_cast<const Index*>(g.edge_id);
    const auto* x = static_cast<const A*>(a.x);
    const auto* grad = static_cast<const A*>(a.grad);
    auto* out = static_cast<A*>(a.dx);
    const int64_t K = a.width;
    const auto at = [&](int64_t e, int64_t k) { return (edge_id ? static_cast<int64_t>(edge_id[e]) : e) * K + k; };
    parallel_for(g.num_tasks, a.threads, [&](int64_t t) {
        for_each_row(g, g.tasks + 5 * t, [&](int64_t row, int64_t begin, int64_t end) {
            for (int64_t k = 0; k < K; ++k) {
                A before = grad[row * K + k];  // product of the messages before e, times the gradient
                for (int64_t e = begin; e < end; ++e) {
                    out[at(e, k)] = before;
                    before *= x[at(e, k)];
                }
                A after = 1;
                for (int64_t e = end; e-- > begin;) {
                    out[at(e, k)] *= after;
                    after *= x[at(e, k)];
                }
            }
        });
    });
    return 0;
}

template <class T>
int edge_softmax(const edge_softmax_args& a) {
    return a.g->index_bytes == 4 ? run_edge_softmax<T, int32_t>(a) : run_edge_softmax<T, int64_t>(a);
}
FOR_WIDE(edge_softmax)

template <class T>
int edge_softmax_grad(const edge_softmax_grad_args& a) {
    return a.g->index_bytes == 4 ? run_edge_softmax_grad<T, int32_t>(a) : run_edge_softmax_grad<T, int64_t>(a);
}
FOR_WIDE(edge_softmax_grad)

template <class T>
int mul_grad(const mul_grad_args& a) {
    return a.g->index_bytes == 4 ? run_mul_grad<T, int32_t>(a) : run_mul_grad<T, int64_t>(a);
}
FOR_WIDE(mul_grad)
}  // namespace stretto::STRETTO_ISA
