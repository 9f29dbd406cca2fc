// Softmax aggregation, channel by channel: out[i] = sum_j p * y with y = act(x[j] + edge[e]) + shift and p the softmax
// of temperature * y over the row's edges. Two numbers per row and channel are kept; messages are made again where
// needed.
#include "kernels/activations.h"

namespace stretto::STRETTO_ISA {

template <class T>
struct SoftmaxSum {
    using A = Acc<T>;
    const stretto_softmax_sum& m;
    const stretto_csr& g;
    const int64_t K;
    const T *x, *edge, *grad;
    const A *temperature, *out;
    A *most, *inverse;

    SoftmaxSum(const stretto_csr& graph, const stretto_softmax_sum& args)
        : m(args),
          g(graph),
          K(args.width),
          x(static_cast<const T*>(m.x)),
          edge(static_cast<const T*>(m.edge)),
          grad(static_cast<const T*>(m.grad)),
          temperature(static_cast<const A*>(m.temperature)),
          out(static_cast<const A*>(m.out)),
          most(static_cast<A*>(m.most)),
          inverse(static_cast<A*>(m.inverse)) {}

    STRETTO_INLINE Activated<A> message(int64_t j, int64_t e, int64_t k, int n) const {
        Vec<A> u = load_lanes(x + j * K + k, n);
        if (edge) u += load_lanes(edge + e * K + k, n);
        Activated<A> y = activate<A>(m.act, u);
        y.value += static_cast<A>(m.shift);
        return y;
    }

    // A row is not cut: the largest value must be known first. Its second reading comes from cache but for hubs.
    int forward(int threads) const {
        constexpr int L = lanes<A>;
        parallel_for(g.num_tasks, threads, [&](int64_t t) {
            const DenormalsAreZero mode(flushes<T>);
            const int64_t* task = g.tasks + 5 * t;
            if (task[4] >= 0 && task[2] != g.rowptr[task[0]]) return;  // a cut row belongs to its first piece
            for (int64_t i = task[0]; i < task[1]; ++i) {
                A *top = most + i * K, *norm = inverse + i * K, *result = static_cast<A*>(m.out) + i * K;
                const bool some = g.rowptr[i] < g.rowptr[i + 1];
                for (int64_t k = 0; k < K; ++k) top[k] = some ? A(-__builtin_inf()) : A(0), norm[k] = 0, result[k] = 0;
                for (int pass = 0; pass < 2; ++pass)
                    for_each_block(g, g.rowptr[i], g.rowptr[i + 1], task[3], [&](const EdgeBlock& block) {
                        for (int b = 0; b < block.n; ++b) {
                            if (pass == 0) prefetch_bytes(x + block.ahead[b] * K, K * static_cast<int64_t>(sizeof(T)));
                            for (int64_t k = 0; k < K; k += L) {
                                const int n = static_cast<int>(K - k < L ? K - k : L);
                                const Vec<A> y = message(block.other[b], block.id[b], k, n).value;
                                const Vec<A> s = y * load_lanes(temperature + k, n), best = load_lanes(top + k, n);
                                if (pass == 0) {
                                    store_lanes(top + k, (s > best) | (s != s) ? s : best, n);
                                } else {
                                    const Vec<A> p = exponential_of(s - best);
                                    store_lanes(norm + k, load_lanes(norm + k, n) + p, n);
                                    store_lanes(result + k, load_lanes(result + k, n) + p * y, n);
                                }
                            }
                        }
                    });
                for (int64_t k = 0; k < K && some; ++k) norm[k] = A(1) / norm[k], result[k] *= norm[k];
            }
        });
        return 0;
    }

    // Over the transposed edges: dx, dedge, dtemperature.
    int backward(int threads) const {
        constexpr int L = lanes<A>;
        auto* parts = static_cast<double*>(__builtin_calloc(static_cast<size_t>(g.num_tasks * K + 1), sizeof(double)));
        if (!parts) return -2;
        const int status = sum_over_rows<T>(
            g, threads, K, K * static_cast<int64_t>(sizeof(A)),
            [&](int64_t j, int64_t begin, int64_t end, int64_t ahead_end, A* into, Scratch& scratch, int64_t task) {
                A* part = scratch.take<A>(K);  // of dtemperature: this block's
                for_each_block(g, begin, end, ahead_end, [&](const EdgeBlock& block) {
                    for (int64_t k = 0; k < K; ++k) part[k] = 0;
                    for (int b = 0; b < block.n; ++b) {
                        const int64_t i = block.other[b], e = block.id[b], ahead = block.ahead[b] * K;
                        const int64_t bytes = K * static_cast<int64_t>(sizeof(A));
                        prefetch_bytes(out + ahead, bytes);
                        prefetch_bytes(most + ahead, bytes);
                        prefetch_bytes(inverse + ahead, bytes);
                        prefetch_bytes(grad + ahead, K * static_cast<int64_t>(sizeof(T)));
                        for (int64_t k = 0; k < K; k += L) {
                            const int n = static_cast<int>(K - k < L ? K - k : L);
                            const Activated<A> y = message(j, e, k, n);
                            const Vec<A> heat = load_lanes(temperature + k, n);
                            const Vec<A> p = exponential_of(y.value * heat - load_lanes(most + i * K + k, n)) *
                                             load_lanes(inverse + i * K + k, n);
                            const Vec<A> weighted = load_lanes(grad + i * K + k, n) * p,
                                         off = y.value - load_lanes(out + i * K + k, n);
                            store_lanes(part + k, load_lanes(part + k, n) + weighted * off * y.value, n);
                            const Vec<A> flow = weighted * (m.detached ? broadcast<A>(1) : A(1) + heat * off),
                                         d = through<A>(m.act, flow, y.slope);
                            store_lanes(into + k, load_lanes(into + k, n) + d, n);
                            if (m.dedge) store_lanes(static_cast<T*>(m.dedge) + e * K + k, d, n);
                        }
                    }
                    add_wide(part, K, parts + task * K);
                });
            },
            [&](int64_t j, A* into) {
                if (m.dx) store_scaled(static_cast<T*>(m.dx) + j * K, into, A(1), K);
            });
        for (int64_t t = 1; t < g.num_tasks; ++t) add_wide(parts + t * K, K, parts);
        if (m.dtemperature) narrow_sums(parts, K, static_cast<A*>(m.dtemperature));
        __builtin_free(parts);
        return status;
    }
};

template <class T>
int edge_softmax_sum(const edge_softmax_sum_args& a) {
    const SoftmaxSum<T> kernel(*a.g, *a.m);
    return a.pass == 0 ? kernel.forward(a.threads) : kernel.backward(a.threads);
}

FOR_FLOATS(edge_softmax_sum)
}  // namespace stretto::STRETTO_ISA
