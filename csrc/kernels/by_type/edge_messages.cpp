// Messages made on the fly from rows at the two ends of an edge and of the edge itself, and summed: nothing of size
// edges x channels is stored but what the caller gave.
#include "kernels/activations.h"

namespace stretto::STRETTO_ISA {

// First, Second: the activations where they are known when compiling, or -1.
template <class T, int First, int Second>
struct EdgeMessages {
    using A = Acc<T>;
    using V = Vec<A>;
    static constexpr int L = lanes<A>;
    static constexpr bool light = First >= 0 && First <= STRETTO_ACT_RELU && Second <= STRETTO_ACT_RELU;
    static constexpr int tile = light ? 4 : 2;  // vectors at a time: activations keep many registers busy
    const stretto_messages& m;
    const stretto_csr& g;
    const int64_t K;
    const T *row[2], *col[2], *edge[2], *grad, *root;
    T *drow[2], *dcol[2], *dedge[2];
    const A root_scale;

    EdgeMessages(const stretto_csr& graph, const stretto_messages& args)
        : m(args),
          g(graph),
          K(args.width),
          grad(static_cast<const T*>(args.grad)),
          root(static_cast<const T*>(args.root)),
          root_scale(static_cast<A>(args.root_scale)) {
        for (int s = 0; s < 2; ++s) {
            row[s] = static_cast<const T*>(m.row[s]);
            col[s] = static_cast<const T*>(m.col[s]);
            edge[s] = static_cast<const T*>(m.edge[s]);
            drow[s] = static_cast<T*>(m.drow[s]);
            dcol[s] = static_cast<T*>(m.dcol[s]);
            dedge[s] = static_cast<T*>(m.dedge[s]);
        }
    }

    STRETTO_INLINE int64_t kind(int s) const {
        if (s == 0) return First >= 0 ? First : m.act[0];
        return Second >= 0 ? Second : m.act[1];
    }
    STRETTO_INLINE bool two() const { return kind(1) != STRETTO_ACT_ONE; }

    // row_s[i] + col_s[j] + edge_s[e] from column k on: NV vectors, the last of n lanes; absent terms are 0.
    template <int NV>
    STRETTO_INLINE void argument(int s, int64_t i, int64_t j, int64_t e, int64_t k, int n, V* u) const {
        for (int v = 0; v < NV; ++v) u[v] = V{};
        add<NV>(row[s], i * m.ld_row[s] + k, n, u);
        add<NV>(col[s], j * m.ld_col[s] + k, n, u);
        add<NV>(edge[s], e * m.ld_edge[s] + k, n, u);
    }
    template <int NV>
    STRETTO_INLINE static void add(const T* base, int64_t at, int n, V* u) {
        if (!base) return;
        for (int v = 0; v < NV; ++v) u[v] += NV > 1 ? load(base + at + v * L) : load_lanes(base + at, n);
    }
    // Calls use(k, n) for tiles of whole vectors, then for what is left, one vector at a time.
    template <class Whole, class Rest>
    STRETTO_INLINE void for_each_tile(Whole&& whole, Rest&& rest) const {
        int64_t k = 0;
        for (; k + tile * L <= K; k += tile * L) whole(k);
        for (; k < K; k += L) rest(k, static_cast<int>(K - k < L ? K - k : L));
    }

    STRETTO_INLINE void prefetch(const EdgeBlock& block, bool by_row) const {
        const int64_t bytes = K * static_cast<int64_t>(sizeof(T));
        for (int b = 0; b < block.n; ++b) {
            for (int s = 0; s < 2; ++s) {
                const T* far = by_row ? col[s] : row[s];
                const int64_t ld = by_row ? m.ld_col[s] : m.ld_row[s];
                if (far) prefetch_bytes(far + block.ahead[b] * ld, bytes);
            }
            if (!by_row && grad) prefetch_bytes(grad + block.ahead[b] * K, bytes);
        }
    }

    template <int NV>
    STRETTO_INLINE void sum_block(const EdgeBlock& block, int64_t i, int64_t k, int n, A* into) const {
        V total[NV], u[NV], w[NV];
        for (int v = 0; v < NV; ++v) total[v] = V{};
        for (int b = 0; b < block.n; ++b) {
            const int64_t j = block.other[b], e = block.id[b];
            argument<NV>(0, i, j, e, k, n, u);
            if (two()) argument<NV>(1, i, j, e, k, n, w);
            for (int v = 0; v < NV; ++v) {
                const V f = activate<A>(kind(0), u[v]).value;
                total[v] += two() ? f * activate<A>(kind(1), w[v]).value : f;
            }
        }
        for (int v = 0; v < NV; ++v) {
            const int lanes_here = NV > 1 ? L : n;
            store_lanes(into + k + v * L, load_lanes(into + k + v * L, lanes_here) + total[v], lanes_here);
        }
    }

    int forward(int threads) const {
        return sum_over_rows<T>(
            g, threads, K, 0,
            [&](int64_t i, int64_t begin, int64_t end, int64_t ahead_end, A* into, Scratch&, int64_t) {
                for_each_block(g, begin, end, ahead_end, [&](const EdgeBlock& block) {
                    prefetch(block, true);
                    for_each_tile([&](int64_t k) { sum_block<tile>(block, i, k, L, into); },
                                  [&](int64_t k, int n) { sum_block<1>(block, i, k, n, into); });
                });
            },
            [&](int64_t i, A* into) {
                T* out = static_cast<T*>(m.out) + i * K;
                if (root)
                    store_plus(out, into, root + i * m.ld_root);
                else
                    store_scaled(out, into, A(1), K);
            });
    }

    // out <- values + root_scale * other
    STRETTO_INLINE void store_plus(T* out, const A* values, const T* other) const {
        for (int64_t k = 0; k < K; k += L) {
            const int n = static_cast<int>(K - k < L ? K - k : L);
            store_lanes(out + k, load_lanes(values + k, n) + root_scale * load_lanes(other + k, n), n);
        }
    }

    // The message's gradient with respect to the arguments of its two factors, times grad[i].
    template <int NV>
    STRETTO_INLINE void slopes(int64_t i, int64_t j, int64_t e, int64_t k, int n, V* d0, V* d1) const {
        V u[NV], w[NV];
        argument<NV>(0, i, j, e, k, n, u);
        if (two()) argument<NV>(1, i, j, e, k, n, w);
        for (int v = 0; v < NV; ++v) {
            const V up = NV > 1 ? load(grad + i * K + k + v * L) : load_lanes(grad + i * K + k, n);
            const Activated<A> f = activate<A>(kind(0), u[v]);
            if (two()) {
                const Activated<A> h = activate<A>(kind(1), w[v]);
                d0[v] = through<A>(kind(0), up * h.value, f.slope), d1[v] = through<A>(kind(1), up * f.value, h.slope);
            } else {
                d0[v] = through<A>(kind(0), up, f.slope), d1[v] = V{};
            }
        }
    }

    template <int NV>
    STRETTO_INLINE void backward_block(const EdgeBlock& block, int64_t near, bool by_row, int64_t k, int n,
                                       T* const* own, A* into) const {
        const int lanes_here = NV > 1 ? L : n;
        V total[2][NV], d[2][NV];
        for (int v = 0; v < NV; ++v) total[0][v] = total[1][v] = V{};
        for (int b = 0; b < block.n; ++b) {
            const int64_t e = block.id[b], i = by_row ? near : block.other[b], j = by_row ? block.other[b] : near;
            slopes<NV>(i, j, e, k, n, d[0], d[1]);
            for (int s = 0; s < 2; ++s) {
                for (int v = 0; v < NV; ++v) total[s][v] += d[s][v];
                if (dedge[s] && !m.pairs)
                    for (int v = 0; v < NV; ++v)
                        store_lanes(dedge[s] + e * m.ld_dedge[s] + k + v * L, d[s][v], lanes_here);
            }
        }
        for (int s = 0; s < 2; ++s)
            for (int v = 0; v < NV && own[s]; ++v) {
                A* at = into + s * K + k + v * L;
                store_lanes(at, load_lanes(at, lanes_here) + total[s][v], lanes_here);
            }
    }

    // Gradients of the terms at the row's own end (destinations if by_row, else sources) and of the edge terms: each
    // edge is met once either way.
    int backward(bool by_row, int threads) const {
        T* const* own = by_row ? drow : dcol;
        const int64_t* ld = by_row ? m.ld_drow : m.ld_dcol;
        return sum_over_rows<T>(
            g, threads, 2 * K, 0,
            [&](int64_t near, int64_t begin, int64_t end, int64_t ahead_end, A* into, Scratch&, int64_t) {
                for_each_block(g, begin, end, ahead_end, [&](const EdgeBlock& block) {
                    prefetch(block, by_row);
                    for_each_tile([&](int64_t k) { backward_block<tile>(block, near, by_row, k, L, own, into); },
                                  [&](int64_t k, int n) { backward_block<1>(block, near, by_row, k, n, own, into); });
                });
            },
            [&](int64_t near, A* into) {
                if (own[0] && root && !by_row)
                    store_plus(own[0] + near * ld[0], into, grad + near * K);
                else if (own[0])
                    store_scaled(own[0] + near * ld[0], into, A(1), K);
                if (own[1]) store_scaled(own[1] + near * ld[1], into + K, A(1), K);
            });
    }

    // drow or dcol as sums of dedge, which an earlier pass has made: no activation is computed a second time.
    int sum_edges(bool by_row, int threads) const {
        T* const* own = by_row ? drow : dcol;
        const int64_t* ld = by_row ? m.ld_drow : m.ld_dcol;
        return sum_over_rows<T>(
            g, threads, 2 * K, 0,
            [&](int64_t, int64_t begin, int64_t end, int64_t ahead_end, A* into, Scratch&, int64_t) {
                for_each_block(g, begin, end, ahead_end, [&](const EdgeBlock& block) {
                    for (int s = 0; s < 2; ++s) {
                        if (!own[s]) continue;
                        A ones[block_edges];
                        for (int b = 0; b < block.n; ++b) ones[b] = 1;
                        add_rows<T>(dedge[s], block.id, m.ld_dedge[s], ones, block.n, K, into + s * K);
                    }
                });
            },
            [&](int64_t near, A* into) {
                for (int s = 0; s < 2; ++s)
                    if (own[s]) store_scaled(own[s] + near * ld[s], into + s * K, A(1), K);
            });
    }

    template <int NV>
    STRETTO_INLINE void backward_pair(int64_t p, int64_t k, int n) const {
        const int64_t j = m.pairs[p], i = m.pairs[m.num_pairs + p];
        V d[2][NV], back[2][NV];
        slopes<NV>(i, j, p, k, n, d[0], d[1]);
        if (i != j) slopes<NV>(j, i, p, k, n, back[0], back[1]);
        for (int s = 0; s < 2; ++s)
            for (int v = 0; v < NV && dedge[s]; ++v)
                store_lanes(dedge[s] + p * m.ld_dedge[s] + k + v * L, i != j ? d[s][v] + back[s][v] : d[s][v],
                            NV > 1 ? L : n);
    }

    // Edge terms shared by both directions of a pair of nodes: their gradient comes from both.
    int backward_pairs(int threads) const {
        constexpr int64_t chunk = 256;
        parallel_for((m.num_pairs + chunk - 1) / chunk, threads, [&](int64_t c) {
            const DenormalsAreZero mode(flushes<T>);
            const int64_t last = (c + 1) * chunk < m.num_pairs ? (c + 1) * chunk : m.num_pairs;
            for (int64_t p = c * chunk; p < last; ++p)
                for_each_tile([&](int64_t k) { backward_pair<tile>(p, k, L); },
                              [&](int64_t k, int n) { backward_pair<1>(p, k, n); });
        });
        return 0;
    }

    int run(const edge_messages_args& a) const {
        switch (a.pass) {
            case STRETTO_MESSAGES_FORWARD:
                return forward(a.threads);
            case STRETTO_MESSAGES_BY_COLUMN:
                return backward(false, a.threads);
            case STRETTO_MESSAGES_BY_ROW:
                return backward(true, a.threads);
            case STRETTO_MESSAGES_SUM_BY_COLUMN:
                return sum_edges(false, a.threads);
            case STRETTO_MESSAGES_SUM_BY_ROW:
                return sum_edges(true, a.threads);
            default:
                return backward_pairs(a.threads);
        }
    }
};

template <class T>
int edge_messages(const edge_messages_args& a) {
#if defined(__AVX2__) || defined(__aarch64__)  // elsewhere the general form: each of these takes seconds to compile
    if constexpr (std::is_same_v<T, float>) {  // the layers of PyG, in the type most models have
        const int64_t first = a.m->act[0], second = a.m->act[1];
        if (first == STRETTO_ACT_RELU && second == STRETTO_ACT_ONE)
            return EdgeMessages<T, STRETTO_ACT_RELU, STRETTO_ACT_ONE>(*a.g, *a.m).run(a);
        if (first == STRETTO_ACT_IDENTITY && second == STRETTO_ACT_IDENTITY)
            return EdgeMessages<T, STRETTO_ACT_IDENTITY, STRETTO_ACT_IDENTITY>(*a.g, *a.m).run(a);
        if (first == STRETTO_ACT_SIGMOID && second == STRETTO_ACT_IDENTITY)
            return EdgeMessages<T, STRETTO_ACT_SIGMOID, STRETTO_ACT_IDENTITY>(*a.g, *a.m).run(a);
        if (first == STRETTO_ACT_SIGMOID && second == STRETTO_ACT_SOFTPLUS)
            return EdgeMessages<T, STRETTO_ACT_SIGMOID, STRETTO_ACT_SOFTPLUS>(*a.g, *a.m).run(a);
    }
#endif
    return EdgeMessages<T, -1, -1>(*a.g, *a.m).run(a);
}

FOR_FLOATS(edge_messages)
}  // namespace stretto::STRETTO_ISA
