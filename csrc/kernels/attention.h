// What the attention kernels share: the exponential, the dropout mask, scores, sums of gathered rows.
//
// Edges are taken in blocks of a row (edge_block.h): scores of a block, its exponentials in whole vectors, then the
// weighted sum while the gathered rows are still in cache.
#pragma once
#include <cmath>

#include "core/denormals.h"
#include "core/parallel.h"
#include "kernels/edge_block.h"
#include "kernels/simd.h"
#include "kernels/table.h"
#include "kernels/wide.h"

namespace stretto::STRETTO_ISA {

// Whether sums of T take numbers without a full mantissa for zero. 16-bit ones do not: converting them needs such
// numbers.
template <class T>
constexpr bool flushes = std::is_same_v<T, Acc<T>>;

// e^x to about 1 ulp in fp32 (0 below the smallest normal number, NaN stays NaN); libm in fp64.
STRETTO_INLINE vf32 exponential_of(vf32 x) {
    const vf32 least = broadcast<float>(-87.3f), most = broadcast<float>(88.0f),
               shifter = broadcast<float>(12582912.0f);
    vf32 y = x > least ? x : least;
    y = y < most ? y : most;
    // Adding 1.5 * 2^23 rounds y / ln 2 to an integer n and leaves it in the low bits of the sum.
    const vf32 shifted = y * 1.44269504f + shifter;
    const vf32 n = shifted - shifter;
    const vf32 r = (y - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts, the first exact in n * part
    vf32 p = broadcast<float>(1.0f / 5040);                      // Taylor: |r| <= ln 2 / 2, the rest is below 6e-9
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = (p * r) * r + r + 1.0f;
    const vi32 power = (reinterpret_cast<vi32>(shifted) - reinterpret_cast<vi32>(shifter) + 127) << 23;
    const vf32 value = p * reinterpret_cast<vf32>(power);
    return x != x ? x : (x < least ? vf32{} : value);
}
STRETTO_INLINE vf64 exponential_of(vf64 x) {
    for (int i = 0; i < lanes<double>; ++i) x[i] = __builtin_exp(x[i]);
    return x;
}
template <class A>
STRETTO_INLINE A exponential_of_one(A x) {
    return exponential_of(broadcast<A>(x))[0];
}

template <class A>
STRETTO_INLINE A larger(A a, A b) {  // NaN wins
    return b > a || b != b ? b : a;
}

// The largest of some lanes and of what came before; NaN wins.
template <class A>
STRETTO_INLINE A largest_of(Vec<A> value, A before) {
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<A, float>) {
        const auto v = reinterpret_cast<__m512>(value);
        if (!_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q)) return larger<A>(before, _mm512_reduce_max_ps(v));
    } else {
        const auto v = reinterpret_cast<__m512d>(value);
        if (!_mm512_cmp_pd_mask(v, v, _CMP_UNORD_Q)) return larger<A>(before, _mm512_reduce_max_pd(v));
    }
#endif
    for (int l = 0; l < lanes<A>; ++l) before = larger<A>(before, value[l]);
    return before;
}

// A number for (seed, counter): two rounds of a 32-bit mixing function with little bias, keyed in between.
STRETTO_INLINE uint32_t mix_bits(uint32_t x) {
    x ^= x >> 16;
    x *= 0x21f0aaadu;
    x ^= x >> 15;
    x *= 0xd35a2d97u;
    return x ^ (x >> 15);
}
STRETTO_INLINE uint32_t random_bits(uint64_t seed, uint64_t counter) {
    const uint32_t first = mix_bits(static_cast<uint32_t>(counter) + static_cast<uint32_t>(seed));
    return mix_bits(first ^ (static_cast<uint32_t>(counter >> 32) + static_cast<uint32_t>(seed >> 32)));
}

// Sum of all lanes by halves, in registers: dot products of one head are so short that this is a good part of them.
template <class A>
STRETTO_INLINE A add_lanes(Vec<A> value) {
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<A, float>)
        return _mm512_reduce_add_ps(reinterpret_cast<__m512>(value));
    else
        return _mm512_reduce_add_pd(reinterpret_cast<__m512d>(value));
#else
    return sum_lanes<A>(value);
#endif
}

template <class P, class Q>
STRETTO_INLINE Acc<P> dot_rows(const P* p, const Q* q, int64_t width) {
    using A = Acc<P>;
    constexpr int L = lanes<A>;
    Vec<A> even{}, odd{};
    int64_t k = 0;
    for (; k + 2 * L <= width; k += 2 * L) {
        even += load(p + k) * load(q + k);
        odd += load(p + k + L) * load(q + k + L);
    }
    for (; k < width; k += L) {
        const int n = static_cast<int>(width - k < L ? width - k : L);
        even += load_lanes(p + k, n) * load_lanes(q + k, n);
    }
    return add_lanes<A>(even + odd);
}

template <class A>
STRETTO_INLINE Vec<A> leaky(Vec<A> z, A slope) {
    return z > 0 ? z : z * slope;
}

// att . leaky_relu(p + q + e)
template <class T>
STRETTO_INLINE Acc<T> dot_leaky(const T* p, const T* q, const T* e, const Acc<T>* att, Acc<T> slope, int64_t width) {
    using A = Acc<T>;
    constexpr int L = lanes<A>;
    Vec<A> even{}, odd{};
    int64_t k = 0;
    for (; k + 2 * L <= width && !e; k += 2 * L) {
        even += load(att + k) * leaky<A>(load(p + k) + load(q + k), slope);
        odd += load(att + k + L) * leaky<A>(load(p + k + L) + load(q + k + L), slope);
    }
    for (; k < width; k += L) {
        const int n = static_cast<int>(width - k < L ? width - k : L);
        Vec<A> z = load_lanes(p + k, n) + load_lanes(q + k, n);
        if (e) z += load_lanes(e + k, n);
        even += load_lanes(att + k, n) * leaky<A>(z, slope);
    }
    return add_lanes<A>(even + odd);
}

// into[0, width) += sum_b weight[b] * rows[which[b] * ld + ...], NV vectors at a time held in registers. The block is
// summed by itself first: long rows then lose fewer digits.
template <class T, int NV>
STRETTO_INLINE void add_tile(const T* rows, const int64_t* which, int64_t ld, const Acc<T>* weight, int count,
                             Acc<T>* into, int tail) {
    using A = Acc<T>;
    constexpr int L = lanes<A>;
    Vec<A> acc[NV];
    for (int k = 0; k < NV; ++k) acc[k] = Vec<A>{};
    for (int b = 0; b < count; ++b) {
        const T* row = rows + which[b] * ld;
        const A w = weight[b];
#pragma GCC unroll 4
        for (int k = 0; k < NV; ++k) acc[k] += w * (k == NV - 1 ? load_lanes(row + k * L, tail) : load(row + k * L));
    }
    for (int k = 0; k < NV; ++k)
        if (k == NV - 1)
            store_lanes(into + k * L, acc[k] + load_lanes(into + k * L, tail), tail);
        else
            store(into + k * L, acc[k] + load(into + k * L));
}

template <class T>
void add_rows(const T* rows, const int64_t* which, int64_t ld, const Acc<T>* weight, int count, int64_t width,
              Acc<T>* into) {
    constexpr int L = lanes<Acc<T>>;
    for (int64_t c = 0; c < width;) {
        const int64_t left = (width - c + L - 1) / L;
        const int vectors = left >= 4 ? 4 : static_cast<int>(left);
        const int64_t rest = width - c - (vectors - 1) * L;
        const int tail = rest < L ? static_cast<int>(rest) : L;
        if (vectors == 4)
            add_tile<T, 4>(rows + c, which, ld, weight, count, into + c, tail);
        else if (vectors == 3)
            add_tile<T, 3>(rows + c, which, ld, weight, count, into + c, tail);
        else if (vectors == 2)
            add_tile<T, 2>(rows + c, which, ld, weight, count, into + c, tail);
        else
            add_tile<T, 1>(rows + c, which, ld, weight, count, into + c, tail);
        c += vectors * L;
    }
}

// out[b] = base[which[b] * step]; entries past `count` are 0, so that what follows may work on whole blocks.
template <class A>
STRETTO_INLINE void gather(const A* base, const int64_t* which, int64_t step, int count, A* out) {
    for (int b = 0; b < count; ++b) out[b] = base[which[b] * step];
    for (int b = count; b < block_edges; ++b) out[b] = 0;
}

// The same for all heads at once, which lie head_step apart: out[h * block_edges + b], entries up to `padded` filled.
template <class A>
STRETTO_INLINE void gather_heads(const A* base, const int64_t* which, int64_t step, int64_t heads, int64_t head_step,
                                 const EdgeBlock& block, A* out) {
    for (int b = 0; b < block.n; ++b) {
        const A* row = base + which[b] * step;
        for (int64_t h = 0; h < heads; ++h) out[h * block_edges + b] = row[h * head_step];
    }
    for (int64_t h = 0; h < heads; ++h)
        for (int b = block.n; b < block.padded; ++b) out[h * block_edges + b] = 0;
}

// stored <- factor * values + plus (may be null)
template <class T>
STRETTO_INLINE void store_scaled(T* stored, const Acc<T>* values, Acc<T> factor, int64_t width,
                                 const Acc<T>* plus = nullptr) {
    constexpr int L = lanes<Acc<T>>;
    for (int64_t k = 0; k < width; k += L) {
        const int n = static_cast<int>(width - k < L ? width - k : L);
        Vec<Acc<T>> value = factor * load_lanes(values + k, n);
        if (plus) value += load_lanes(plus + k, n);
        store_lanes(stored + k, value, n);
    }
}

// The arguments with their types.
template <class T>
struct Attention {
    using A = Acc<T>;
    const stretto_attention& a;
    const stretto_csr& g;
    const int64_t H, F, K, D;              // heads, width, score_width, attr_width
    const int64_t value_step, right_step;  // from head to head of v and right
    const T *v, *left_rows, *right_rows, *edge_rows, *attr, *query;
    const A *left, *right, *edge, *att;
    const A slope, scale;
    const uint32_t drop_below;  // a mask number below this drops the edge
    const A keep_factor;

    Attention(const stretto_csr& graph, const stretto_attention& args)
        : a(args),
          g(graph),
          H(a.heads),
          F(a.width),
          K(a.score_width),
          D(a.attr_width),
          value_step(a.value_heads == 1 ? 0 : F),
          right_step(a.right_heads == 1 ? 0 : K),
          v(static_cast<const T*>(a.v)),
          left_rows(static_cast<const T*>(a.left)),
          right_rows(static_cast<const T*>(a.right)),
          edge_rows(static_cast<const T*>(a.edge)),
          attr(static_cast<const T*>(a.attr)),
          query(static_cast<const T*>(a.query)),
          left(static_cast<const A*>(a.left)),
          right(static_cast<const A*>(a.right)),
          edge(static_cast<const A*>(a.edge)),
          att(static_cast<const A*>(a.att)),
          slope(static_cast<A>(a.slope)),
          scale(static_cast<A>(a.scale)),
          drop_below(a.dropout >= 1 ? 0xffffffffu : static_cast<uint32_t>(a.dropout * 4294967296.0)),
          keep_factor(a.dropout >= 1 ? A(0) : A(1 / (1 - a.dropout))) {}

    STRETTO_INLINE bool reads_rows() const { return a.form >= STRETTO_SCORE_SUM_ROWS; }

    // Factors of the block's dropout mask for head h: 0 or 1 / (1 - p).
    STRETTO_INLINE void mask(const EdgeBlock& block, int64_t h, A* factor) const {
        for (int b = 0; b < block.n; ++b) {
            const uint64_t counter =
                static_cast<uint64_t>(block.id[b]) * static_cast<uint64_t>(H) + static_cast<uint64_t>(h);
            factor[b] = random_bits(a.seed, counter) < drop_below ? A(0) : keep_factor;
        }
    }

    // Scores of a block into score[h * block_edges + b]; for SUM also the argument of the leaky_relu into `inner`.
    // by_row: the row is the destination (left end) and the far ends are sources; else the other way round.
    // Sums are written so that both ways round off alike.
    void scores(const EdgeBlock& block, int64_t row, bool by_row, A* score, A* inner) const {
        constexpr int B = block_edges;
        const auto form = a.form;
        if (a.scores && !by_row) {
            block.fetch_edges(static_cast<const A*>(a.scores), H);
            gather_heads(static_cast<const A*>(a.scores), block.id, H, H, 1, block, score);
            if (form == STRETTO_SCORE_SUM)
                __builtin_memcpy(inner, score, static_cast<size_t>(H * B) * sizeof(A));
            else
                for (int b = 0; b < block.n; ++b) {
                    prefetch_bytes(left_rows + block.ahead[b] * a.ldl, H * K * static_cast<int64_t>(sizeof(T)));
                    prefetch_bytes(static_cast<const T*>(a.grad) + block.ahead[b] * a.ldg,
                                   H * F * static_cast<int64_t>(sizeof(T)));
                }
        } else if (form == STRETTO_SCORE_GIVEN || form == STRETTO_SCORE_WEIGHT) {
            gather_heads(edge, block.id, H, H, 1, block, score);
        } else if (form == STRETTO_SCORE_SUM) {
            const A* near = (by_row ? left : right) + row * H;
            const A* far = by_row ? right : left;
            constexpr int L = lanes<A>;
            block.fetch_ends(far, H);
            gather_heads(far, block.other, H, H, 1, block, inner);
            for (int64_t h = 0; h < H; ++h) {
                A *z = inner + h * B, e[B];
                if (edge) gather(edge + h, block.id, H, block.n, e);
                for (int b = 0; b < block.padded; b += L) {
                    Vec<A> sum = load(z + b) + near[h];
                    if (edge) sum += load(e + b);
                    store(z + b, sum);
                    store(score + h * B + b, leaky<A>(sum, slope));
                }
            }
        } else {
            const T* near = by_row ? left_rows + row * a.ldl : right_rows + row * a.ldr;
            const T* far = by_row ? right_rows : left_rows;
            const int64_t ld = by_row ? a.ldr : a.ldl, near_step = by_row ? K : right_step,
                          far_step = by_row ? right_step : K;
            const T* second = by_row ? v : static_cast<const T*>(a.grad);
            const int64_t second_ld = by_row ? a.ldv : a.ldg,
                          second_bytes = (by_row ? a.value_heads : H) * F * static_cast<int64_t>(sizeof(T)),
                          far_bytes = (by_row ? a.right_heads : H) * K * static_cast<int64_t>(sizeof(T));
            for (int b = 0; b < block.n; ++b) {
                prefetch_bytes(far + block.ahead[b] * ld, far_bytes);
                if (second != far) prefetch_bytes(second + block.ahead[b] * second_ld, second_bytes);
                const T* end = far + block.other[b] * ld;
                const int64_t i = by_row ? row : block.other[b];
                for (int64_t h = 0; h < H; ++h) {
                    const T *p = near + h * near_step, *q = end + h * far_step;
                    A s;
                    if (form == STRETTO_SCORE_SUM_ROWS) {
                        s = dot_leaky(p, q, edge_rows ? edge_rows + (block.id[b] * H + h) * K : nullptr, att + h * K,
                                      slope, K);
                    } else {
                        s = dot_rows(p, q, K);
                        if (query) s += dot_rows(query + (i * H + h) * D, attr + block.id[b] * D, D);
                        s *= scale;
                    }
                    score[h * B + b] = s;
                }
            }
        }
        const A filler = form == STRETTO_SCORE_WEIGHT ? A(0) : A(-__builtin_inf());
        for (int64_t h = 0; h < H; ++h)
            for (int b = block.n; b < block.padded; ++b) score[h * B + b] = filler;
    }
};

// Sums over rows of values of type T: edges(row, begin, end, ahead_end, into, scratch, task) adds to into[0, size),
// finish(row, into) stores the row. `extra` bytes of scratch per task.
template <class T, bool Flush = flushes<T>, class Edges, class Finish>
int sum_over_rows(const stretto_csr& g, int threads, int64_t size, int64_t extra, Edges&& edges, Finish&& finish) {
    using A = Acc<T>;
    A* slots = nullptr;
    const int64_t row_bytes = (size * static_cast<int64_t>(sizeof(A)) + 63) / 64 * 64;
    if (g.num_slots > 0) {
        slots = static_cast<A*>(__builtin_malloc(static_cast<size_t>(g.num_slots * size + 1) * sizeof(A)));
        if (!slots) return -2;
    }
    bool failed = false;
    parallel_for(g.num_tasks, threads, [&](int64_t t) {
        const DenormalsAreZero mode(Flush);
        const int64_t* task = g.tasks + 5 * t;
        Scratch scratch(row_bytes + extra + 1024);
        if (!scratch.memory) {
            failed = true;
            return;
        }
        A* own = scratch.take<A>(size);
        const int64_t kept = scratch.used;
        for (int64_t row = task[0]; row < task[1]; ++row) {
            const bool piece = task[4] >= 0;
            A* into = piece ? slots + task[4] * size : own;
            for (int64_t k = 0; k < size; ++k) into[k] = 0;
            scratch.used = kept;
            edges(row, piece ? task[2] : g.rowptr[row], piece ? task[3] : g.rowptr[row + 1], task[3], into, scratch, t);
            if (!piece) finish(row, into);
        }
    });
    if (slots && !failed) {
        parallel_for(g.num_hubs, threads, [&](int64_t h) {
            const DenormalsAreZero mode(Flush);
            const int64_t* hub = g.hubs + 3 * h;
            A* into = slots + hub[1] * size;
            constexpr int64_t at_once = 64;
            for (int64_t k = 0; k < size; k += at_once) {
                const int64_t n = size - k < at_once ? size - k : at_once;
                double wide[at_once] = {};
                for (int64_t s = hub[1]; s < hub[2]; ++s) add_wide(slots + s * size + k, n, wide);
                narrow_sums(wide, n, into + k);
            }
            finish(hub[0], into);
        });
    }
    __builtin_free(slots);
    return failed ? -2 : 0;
}

}  // namespace stretto::STRETTO_ISA
