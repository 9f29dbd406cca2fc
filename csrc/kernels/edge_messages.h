// Messages made on the fly from rows at the two ends of an edge and of the edge itself, and summed: nothing of size
// edges x channels is stored but what the caller gave.
#pragma once
#include "kernels/attention.h"

namespace stretto::STRETTO_ISA {

// log(1 + t) for t in [0, 1]: 2 artanh(t / (2 + t)), whose series in z <= 1/3 is cut below 1e-8.
STRETTO_INLINE vf32 log_one_plus(vf32 t) {
    const vf32 z = t / (t + 2.0f), s = z * z;
    vf32 p = broadcast<float>(1.0f / 15);
    p = p * s + 1.0f / 13;
    p = p * s + 1.0f / 11;
    p = p * s + 1.0f / 9;
    p = p * s + 1.0f / 7;
    p = p * s + 0.2f;
    p = p * s + 1.0f / 3;
    return 2.0f * (z + z * (p * s));
}
STRETTO_INLINE vf64 log_one_plus(vf64 t) {
    for (int i = 0; i < lanes<double>; ++i) t[i] = __builtin_log1p(t[i]);
    return t;
}

// Value and derivative of an activation.
template <class A>
struct Activated {
    Vec<A> value, slope;
};

template <class A>
STRETTO_INLINE Activated<A> activate(int64_t kind, Vec<A> u) {
    const Vec<A> one = broadcast<A>(1);
    if (kind == STRETTO_ACT_ONE) return {one, Vec<A>{}};
    if (kind == STRETTO_ACT_IDENTITY) return {u, one};
    if (kind == STRETTO_ACT_RELU) return {(u > 0) | (u != u) ? u : Vec<A>{}, u > 0 ? one : Vec<A>{}};
    const Vec<A> t = exponential_of(u > 0 ? -u : u);  // e^-|u|, never large
    const Vec<A> half = one / (one + t);
    const Vec<A> sigmoid = u > 0 ? half : t * half;
    if (kind == STRETTO_ACT_SIGMOID) return {sigmoid, sigmoid * (one - sigmoid)};
    if (kind == STRETTO_ACT_SOFTPLUS) return {((u > 0) | (u != u) ? u : Vec<A>{}) + log_one_plus(t), sigmoid};
    return {u * sigmoid, sigmoid * (one + u * (one - sigmoid))};  // silu
}

template <class T>
struct EdgeMessages {
    using A = Acc<T>;
    const stretto_messages& m;
    const stretto_csr& g;
    const int64_t K;
    const T *row[2], *col[2], *edge[2];
    const T* grad;

    EdgeMessages(const stretto_csr& graph, const stretto_messages& args) : m(args), g(graph), K(args.width) {
        for (int s = 0; s < 2; ++s) {
            row[s] = static_cast<const T*>(m.row[s]);
            col[s] = static_cast<const T*>(m.col[s]);
            edge[s] = static_cast<const T*>(m.edge[s]);
        }
        grad = static_cast<const T*>(m.grad);
    }

    // row_s[i] + col_s[j] + edge_s[e], lanes k .. k + n; absent terms are 0.
    STRETTO_INLINE Vec<A> argument(int s, int64_t i, int64_t j, int64_t e, int64_t k, int n) const {
        Vec<A> u{};
        if (row[s]) u += load_lanes(row[s] + i * K + k, n);
        if (col[s]) u += load_lanes(col[s] + j * K + k, n);
        if (edge[s]) u += load_lanes(edge[s] + e * K + k, n);
        return u;
    }

    STRETTO_INLINE void prefetch(const EdgeBlock& block, int b, bool by_row) const {
        const int64_t bytes = K * static_cast<int64_t>(sizeof(T));
        for (int s = 0; s < 2; ++s) {
            const T* far = by_row ? col[s] : row[s];
            if (far) prefetch_bytes(far + block.ahead[b] * K, bytes);
        }
        if (!by_row) prefetch_bytes(grad + block.ahead[b] * K, bytes);
    }

    int forward(int threads) const {
        constexpr int L = lanes<A>;
        return sum_over_rows<A>(
            g, threads, K, 0,
            [&](int64_t i, int64_t begin, int64_t end, int64_t ahead_end, A* into, Scratch&, int64_t) {
                for_each_block(g, begin, end, ahead_end, [&](const EdgeBlock& block) {
                    for (int b = 0; b < block.n; ++b) {
                        prefetch(block, b, true);
                        const int64_t j = block.other[b], e = block.id[b];
                        for (int64_t k = 0; k < K; k += L) {
                            const int n = static_cast<int>(K - k < L ? K - k : L);
                            Vec<A> message = activate<A>(m.act[0], argument(0, i, j, e, k, n)).value;
                            if (m.act[1] != STRETTO_ACT_ONE)
                                message *= activate<A>(m.act[1], argument(1, i, j, e, k, n)).value;
                            store_lanes(into + k, load_lanes(into + k, n) + message, n);
                        }
                    }
                });
            },
            [&](int64_t i, A* into) { store_scaled(static_cast<T*>(m.out) + i * K, into, A(1), K); });
    }

    // Gradients of the terms at the row's own end (destinations if by_row, else sources) and, from the pass over the
    // transposed edges, of the edge terms.
    int backward(bool by_row, int threads) const {
        constexpr int L = lanes<A>;
        T* own[2];
        for (int s = 0; s < 2; ++s) own[s] = static_cast<T*>(by_row ? m.drow[s] : m.dcol[s]);
        return sum_over_rows<A>(
            g, threads, 2 * K, 0,
            [&](int64_t near, int64_t begin, int64_t end, int64_t ahead_end, A* into, Scratch&, int64_t) {
                for_each_block(g, begin, end, ahead_end, [&](const EdgeBlock& block) {
                    for (int b = 0; b < block.n; ++b) {
                        prefetch(block, b, by_row);
                        const int64_t e = block.id[b], i = by_row ? near : block.other[b],
                                      j = by_row ? block.other[b] : near;
                        for (int64_t k = 0; k < K; k += L) {
                            const int n = static_cast<int>(K - k < L ? K - k : L);
                            const Vec<A> up = load_lanes(grad + i * K + k, n);
                            const Activated<A> f = activate<A>(m.act[0], argument(0, i, j, e, k, n));
                            Activated<A> h{broadcast<A>(1), Vec<A>{}};
                            if (m.act[1] != STRETTO_ACT_ONE) h = activate<A>(m.act[1], argument(1, i, j, e, k, n));
                            const Vec<A> d[2] = {up * h.value * f.slope, up * f.value * h.slope};
                            for (int s = 0; s < 2; ++s) {
                                if (own[s]) store_lanes(into + s * K + k, load_lanes(into + s * K + k, n) + d[s], n);
                                if (!by_row && m.dedge[s])
                                    store_lanes(static_cast<T*>(m.dedge[s]) + e * K + k, d[s], n);
                            }
                        }
                    }
                });
            },
            [&](int64_t near, A* into) {
                for (int s = 0; s < 2; ++s)
                    if (own[s]) store_scaled(own[s] + near * K, into + s * K, A(1), K);
            });
    }
};

template <class T>
int run_messages(const MessagesArgs& a) {
    const EdgeMessages<T> kernel(*a.g, *a.m);
    return a.pass == 0 ? kernel.forward(a.threads) : kernel.backward(a.pass == 2, a.threads);
}

}  // namespace stretto::STRETTO_ISA
