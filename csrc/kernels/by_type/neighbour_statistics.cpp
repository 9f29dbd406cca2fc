// Several statistics of the same neighbours in one reading of them: sum, mean, smallest, largest, variance, deviation.
//
// Messages are x[j] + own[i]: own moves sum, mean and extrema and leaves the rest alone, so it is added to the result.
// Nothing is kept for backward. It reads the neighbours again and writes, for each row, what its edges need in one
// place:
//     base + bend * x[j], and of each extremum its value and the share of those that attain it.
#include "kernels/attention.h"

namespace stretto::STRETTO_ISA {

template <class T>
struct Statistics {
    using A = Acc<T>;
    using V = Vec<A>;
    static constexpr int L = lanes<A>;
    enum Part { Sum, Square, Least, LeastTies, Most, MostTies, parts };  // of a row's running state, K numbers each
    const stretto_statistics& m;
    const stretto_csr& g;
    const int64_t K;
    const T *x, *own, *grad;
    T *out, *dx, *down;
    A* packed;
    int64_t base, bend, least, most, packed_width;  // places in a packed row; -1: absent

    Statistics(const stretto_csr& graph, const stretto_statistics& args)
        : m(args),
          g(graph),
          K(args.width),
          x(static_cast<const T*>(args.x)),
          own(static_cast<const T*>(args.own)),
          grad(static_cast<const T*>(args.grad)),
          out(static_cast<T*>(args.out)),
          dx(static_cast<T*>(args.dx)),
          down(static_cast<T*>(args.down)),
          packed(static_cast<A*>(args.packed)) {
        int64_t next = K;
        const auto take = [&](bool wanted, int64_t width) {
            const int64_t at = wanted ? next : -1;
            if (wanted) next += width;
            return at;
        };
        base = 0;
        bend = take(has(STRETTO_STATISTIC_VAR) || has(STRETTO_STATISTIC_STD), K);
        least = take(has(STRETTO_STATISTIC_MIN), 2 * K);
        most = take(has(STRETTO_STATISTIC_MAX), 2 * K);
        packed_width = next;
    }

    STRETTO_INLINE bool has(int name) const { return m.place[name] >= 0; }

    // The row's centre: squares are taken from its first neighbour, so that a large common mean costs no digits.
    STRETTO_INLINE const T* centre(int64_t row) const {
        const int64_t e = g.rowptr[row];
        int64_t j = e;
        if (g.col)
            j = g.index_bytes == 4 ? static_cast<const int32_t*>(g.col)[e] : static_cast<const int64_t*>(g.col)[e];
        return x + j * m.ld_x;
    }

    void start(A* state) const {
        for (int64_t k = 0; k < K; ++k) {
            state[Sum * K + k] = state[Square * K + k] = state[LeastTies * K + k] = state[MostTies * K + k] = 0;
            state[Least * K + k] = state[Most * K + k] = A(-__builtin_inf());  // of -x and of x
        }
    }

    void edges(int64_t row, int64_t begin, int64_t end, int64_t ahead_end, A* state) const {
        const T* middle = centre(row);
        for_each_block(g, begin, end, ahead_end, [&](const EdgeBlock& block) {
            for (int b = 0; b < block.n; ++b)
                prefetch_bytes(x + block.ahead[b] * m.ld_x, K * static_cast<int64_t>(sizeof(T)));
            int64_t k = 0;
            for (; k + 2 * L <= K; k += 2 * L) tile<2>(block, middle, k, L, state);
            for (; k < K; k += L) tile<1>(block, middle, k, static_cast<int>(K - k < L ? K - k : L), state);
        });
    }

    template <int NV>
    STRETTO_INLINE void tile(const EdgeBlock& block, const T* middle, int64_t k, int n, A* state) const {
        const int here = NV > 1 ? L : n;
        V now[parts][NV], c[NV];
        const V one = broadcast<A>(1);
        for (int v = 0; v < NV; ++v) {
            c[v] = load_lanes(middle + k + v * L, here);
            now[Sum][v] = now[Square][v] = V{};
            for (int p = Least; p < parts; ++p) now[p][v] = load_lanes(state + p * K + k + v * L, here);
        }
        for (int b = 0; b < block.n; ++b) {
            const T* from = x + block.other[b] * m.ld_x + k;
            for (int v = 0; v < NV; ++v) {
                const V value = load_lanes(from + v * L, here), off = value - c[v];
                now[Sum][v] += off;
                now[Square][v] += off * off;
                now[Least][v] = larger_counting<A>(now[Least][v], now[LeastTies][v], -value, one);
                now[Most][v] = larger_counting<A>(now[Most][v], now[MostTies][v], value, one);
            }
        }
        for (int v = 0; v < NV; ++v)
            for (int p = 0; p < parts; ++p) {
                A* at = state + p * K + k + v * L;
                store_lanes(at, p <= Square ? load_lanes(at, here) + now[p][v] : now[p][v], here);
            }
    }

    // state <- state and other, two pieces of one row
    void merge(A* state, const A* other) const {
        for (int64_t k = 0; k < K; k += L) {
            const int n = static_cast<int>(K - k < L ? K - k : L);
            for (int p = Sum; p <= Square; ++p)
                store_lanes(state + p * K + k, load_lanes(state + p * K + k, n) + load_lanes(other + p * K + k, n), n);
            for (int p = Least; p < parts; p += 2) {
                V ties = load_lanes(state + (p + 1) * K + k, n);
                const V best =
                    larger_counting<A>(load_lanes(state + p * K + k, n), ties, load_lanes(other + p * K + k, n),
                                       load_lanes(other + (p + 1) * K + k, n));
                store_lanes(state + p * K + k, best, n);
                store_lanes(state + (p + 1) * K + k, ties, n);
            }
        }
    }

    // finish(row, state) for every row; state is null for a row without edges.
    template <class Finish>
    int rows(int threads, Finish&& finish) const {
        const int64_t size = parts * K;
        A* slots = nullptr;
        if (g.num_slots > 0) {
            slots = static_cast<A*>(__builtin_malloc(static_cast<size_t>(g.num_slots * size + 1) * sizeof(A)));
            if (!slots) return -2;
        }
        bool failed = false;
        parallel_for(g.num_tasks, threads, [&](int64_t t) {
            const int64_t* task = g.tasks + 5 * t;
            if (task[4] >= 0) {
                start(slots + task[4] * size);
                edges(task[0], task[2], task[3], task[3], slots + task[4] * size);
                return;
            }
            Scratch scratch(size * static_cast<int64_t>(sizeof(A)) + 1024);
            if (!scratch.memory) {
                failed = true;
                return;
            }
            A* state = scratch.take<A>(size);
            for (int64_t row = task[0]; row < task[1]; ++row) {
                if (g.rowptr[row] == g.rowptr[row + 1]) {
                    finish(row, nullptr);
                    continue;
                }
                start(state);
                edges(row, g.rowptr[row], g.rowptr[row + 1], task[3], state);
                finish(row, state);
            }
        });
        if (slots && !failed)
            parallel_for(g.num_hubs, threads, [&](int64_t h) {
                const int64_t* hub = g.hubs + 3 * h;
                A* state = slots + hub[1] * size;
                for (int64_t s = hub[1] + 1; s < hub[2]; ++s) merge(state, slots + s * size);
                finish(hub[0], state);
            });
        __builtin_free(slots);
        return failed ? -2 : 0;
    }

    // What one row's state says, lanes k .. k + n.
    struct Found {
        V mean, var, std;  // mean of x alone
    };
    STRETTO_INLINE Found found(int64_t row, const A* state, int64_t k, int n) const {
        const A share = A(1) / static_cast<A>(g.rowptr[row + 1] - g.rowptr[row]);
        const V off = load_lanes(state + Sum * K + k, n) * share;
        const V var = load_lanes(state + Square * K + k, n) * share - off * off;
        const V zero{};
        const V floor = (var > A(1e-5)) | (var != var) ? var : broadcast<A>(1);
        return {load_lanes(centre(row) + k, n) + off, var, (var > A(1e-5)) | (var != var) ? root_of(floor) : zero};
    }
    STRETTO_INLINE static V root_of(V v) {
        for (int i = 0; i < L; ++i) {
            if constexpr (std::is_same_v<A, float>)
                v[i] = __builtin_sqrtf(v[i]);
            else
                v[i] = __builtin_sqrt(v[i]);
        }
        return v;
    }

    int forward(int threads) const {
        return rows(threads, [&](int64_t row, const A* state) {
            T* result = out + row * m.ld_out;
            for (int64_t k = 0; k < K; k += L) {
                const int n = static_cast<int>(K - k < L ? K - k : L);
                const auto put = [&](int name, V value) {
                    if (has(name)) store_lanes(result + m.place[name] + k, value, n);
                };
                if (!state) {
                    for (int name = 0; name < STRETTO_STATISTICS; ++name) put(name, V{});
                    continue;
                }
                const V shift = own ? load_lanes(own + row * K + k, n) : V{};
                const Found f = found(row, state, k, n);
                const A count = static_cast<A>(g.rowptr[row + 1] - g.rowptr[row]);
                put(STRETTO_STATISTIC_SUM, (f.mean + shift) * count);
                put(STRETTO_STATISTIC_MEAN, f.mean + shift);
                put(STRETTO_STATISTIC_MIN, shift - load_lanes(state + Least * K + k, n));
                put(STRETTO_STATISTIC_MAX, shift + load_lanes(state + Most * K + k, n));
                put(STRETTO_STATISTIC_VAR, f.var);
                put(STRETTO_STATISTIC_STD, f.std);
            }
        });
    }

    // Statistics again, and from them and grad the packed rows and the gradient of own.
    int prepare(int threads) const {
        return rows(threads, [&](int64_t row, const A* state) {
            A* to = packed + row * packed_width;
            const T* up = grad + row * m.ld_out;
            for (int64_t k = 0; k < K; k += L) {
                const int n = static_cast<int>(K - k < L ? K - k : L);
                if (!state) {  // no edge will read it
                    if (down) store_lanes(down + row * K + k, V{}, n);
                    continue;
                }
                const auto of = [&](int name) { return has(name) ? load_lanes(up + m.place[name] + k, n) : V{}; };
                const A count = static_cast<A>(g.rowptr[row + 1] - g.rowptr[row]), share = A(1) / count;
                const Found f = found(row, state, k, n);
                const V shift = own ? load_lanes(own + row * K + k, n) : V{};
                const V sum = of(STRETTO_STATISTIC_SUM), mean = of(STRETTO_STATISTIC_MEAN);
                V all = mean * share + sum;
                if (bend >= 0) {
                    const V root = f.std > 0 ? f.std : broadcast<A>(1);
                    V curve = of(STRETTO_STATISTIC_VAR);
                    curve += f.std > 0 ? of(STRETTO_STATISTIC_STD) / (A(2) * root) : (f.std != f.std ? f.std : V{});
                    curve *= A(2) * share;
                    store_lanes(to + bend + k, curve, n);
                    all -= curve * f.mean;
                }
                store_lanes(to + base + k, all, n);
                // Writes an extremum and its share; what all that attain it get together goes to own.
                const auto extremum = [&](int64_t at, V value, V ties, V flow) {
                    if (at < 0) return V{};
                    // scatter_reduce counts the zero its result starts from among those that attain 0.
                    const V whole = value + shift;
                    const V part = flow / (ties + (whole == 0 ? broadcast<A>(1) : V{}));
                    store_lanes(to + at + k, value, n);
                    store_lanes(to + at + K + k, whole == whole ? part : whole, n);
                    return whole == whole ? part * ties : whole;
                };
                const V low = extremum(least, -load_lanes(state + Least * K + k, n),
                                       load_lanes(state + LeastTies * K + k, n), of(STRETTO_STATISTIC_MIN));
                const V high = extremum(most, load_lanes(state + Most * K + k, n),
                                        load_lanes(state + MostTies * K + k, n), of(STRETTO_STATISTIC_MAX));
                if (down) store_lanes(down + row * K + k, mean + low + high + sum * count, n);
            }
        });
    }

    // Over the transposed edges, from packed rows: dx.
    int backward(int threads) const {
        return sum_over_rows<T, false>(  // extrema are compared: every number counts
            g, threads, K, 0,
            [&](int64_t j, int64_t begin, int64_t end, int64_t ahead_end, A* into, Scratch&, int64_t) {
                for_each_block(g, begin, end, ahead_end, [&](const EdgeBlock& block) {
                    for (int b = 0; b < block.n; ++b)
                        prefetch_bytes(packed + block.ahead[b] * packed_width,
                                       packed_width * static_cast<int64_t>(sizeof(A)));
                    for (int64_t k = 0; k < K; k += L) {
                        const int n = static_cast<int>(K - k < L ? K - k : L);
                        const V value = load_lanes(x + j * m.ld_x + k, n);
                        V d{};  // a block is summed by itself first: long rows then lose fewer digits
                        for (int b = 0; b < block.n; ++b) {
                            const A* from = packed + block.other[b] * packed_width;
                            d += load_lanes(from + k, n);
                            if (bend >= 0) d += value * load_lanes(from + bend + k, n);
                            if (least >= 0) d += attained(from + least + k, value, n);
                            if (most >= 0) d += attained(from + most + k, value, n);
                        }
                        store_lanes(into + k, load_lanes(into + k, n) + d, n);
                    }
                });
            },
            [&](int64_t j, A* into) { store_scaled(dx + j * K, into, A(1), K); });
    }
    STRETTO_INLINE V attained(const A* from, V value, int n) const {
        const V best = load_lanes(from, n), share = load_lanes(from + K, n);
        return (value == best) | (share != share) ? share : V{};  // a NaN reaches all entries, as in torch
    }
};

template <class T>
int neighbour_statistics(const neighbour_statistics_args& a) {
    const Statistics<T> kernel(*a.g, *a.m);
    if (a.pass == 0) return kernel.forward(a.threads);
    return a.pass == 1 ? kernel.prepare(a.threads) : kernel.backward(a.threads);
}

FOR_FLOATS(neighbour_statistics)
}  // namespace stretto::STRETTO_ISA
